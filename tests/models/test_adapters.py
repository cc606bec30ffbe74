"""Layers of PEFT in fused models: what is active at a call decides, and numbers are the model's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from fuse_models import ENCODER, assert_same_step, fused_rules, llama, step_of

import transformer_ops as tops

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS = {"layer": 2, "norm": 1}


def base() -> Any:
    return llama(intermediate_size=48, pad_token_id=None)


def adapted(model: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False} | options
    return peft.get_peft_model(base() if model is None else model, peft.LoraConfig(**options))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


def results(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss, grads = step_of(model, batch())
    return loss.item(), grads


def assert_same(plain: Any, model: Any, tolerance: float = 5e-5) -> None:
    assert_same_step(plain, model, batch(), tolerance, least=1e-8)


def reasons(report: Any) -> str:
    return " ".join(str(row.reason) for row in report.skipped)


# What a user does with adapters, step by step; after each one the models are compared.
def toggles(model: Any) -> Any:
    with model.disable_adapter():
        yield
    yield
    for _ in range(3):
        with model.disable_adapter():
            yield


def merges(model: Any) -> Any:
    model.merge_adapter()
    yield
    model.unmerge_adapter()
    yield


def several(model: Any) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        target_modules=["q_proj", "up_proj"],
        init_lora_weights=False,
    )
    model.add_adapter("second", config)
    yield
    model.set_adapter("second")
    yield
    model.base_model.set_adapter(["default", "second"])
    yield
    model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mean", combination_type="cat")
    model.set_adapter("mean")
    yield
    model.set_adapter("default")
    model.delete_adapter("second")
    yield


def scales(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)
    yield
    for module in model.modules():
        if hasattr(module, "unscale_layer"):
            module.unscale_layer()
    yield


@pytest.mark.parametrize("what", [toggles, merges, several, scales])
def test_what_users_do_with_adapters(what: Callable[[Any], Any]) -> None:
    plain, model = adapted(), adapted()
    report = tops.fuse(model)
    assert fused_rules(report) == LAYERS and not report.skipped
    assert_same(plain, model)
    for _ in zip(what(plain), what(model), strict=True):
        assert_same(plain, model)
        assert fused_rules(report) == LAYERS
    assert_same(plain, model)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True, "lora_alpha": 7},
        {"rank_pattern": {"q_proj": 5, "down_proj": 1}, "alpha_pattern": {"up_proj": 9}},
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["down_proj"], "layers_to_transform": [1]},
        {"lora_bias": True, "lora_alpha": 3},
    ],
    ids=str,
)
def test_options_of_adapters(options: dict[str, Any]) -> None:
    plain, model = adapted(**options), adapted(**options)
    report = tops.fuse(model)
    assert_same(plain, model)
    assert fused_rules(report) == LAYERS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"use_dora": True},
            "the adapter default of peft.tuners.lora.layer.Linear is a DoraLinear",
        ),
        ({"target_modules": ["q_proj", "lm_head"]}, "layer.Linear is not a torch.nn.Linear"),
    ],
    ids=str,
)
def test_what_runs_as_statements(options: dict[str, Any], reason: str) -> None:
    plain, model = adapted(**options), adapted(**options)
    report = tops.fuse(model)
    assert_same(plain, model)
    assert reason in reasons(report)


def test_a_rule_of_the_users_views_layers_of_peft() -> None:
    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(16, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            return x * 2.0

    def make(module: Any, names: Any) -> list[Any]:
        return [tops.view(module.up), tops.ConstantScale(2.0)]

    torch.manual_seed(0)
    model = adapted(torch.nn.Sequential(Squares()), target_modules=["up"])
    plain, x = copy.deepcopy(model), torch.randn(3, 16)
    tops.register_fuse_rule("squares", "H = self.any_up(H)\nreturn H * 2.0", make)
    report = tops.fuse(model, rules=["squares"])
    torch.testing.assert_close(model(x), plain(x))
    with model.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(model(x), plain(x))
    model.merge_adapter()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert [row.rule for row in report.fused] == ["squares"]


def test_a_call_that_names_an_adapter_for_each_row() -> None:
    plain, model = adapted(), adapted()
    report = tops.fuse(model)
    named = {"input_ids": batch()["input_ids"], "adapter_names": ["default", "second"]}
    for one in (plain, model):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
        one.add_adapter("second", config)
        one.eval()
    with torch.no_grad():
        found, want = (one(**named).logits for one in (model, plain))
        other = model(input_ids=named["input_ids"]).logits
    torch.testing.assert_close(found, want)
    assert not torch.allclose(found[1], other[1])
    assert fused_rules(report) == LAYERS


def test_float32_adapters_on_bfloat16_weights() -> None:
    """The gradients of adapters have their dtype, and are as near to float64's as the model's."""
    errors = [0.0, 0.0]
    for seed in range(8):
        rounded = base()
        torch.manual_seed(seed)
        for parameter in rounded.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
        plain = adapted(rounded.bfloat16())
        exact, model = copy.deepcopy(plain).double(), copy.deepcopy(plain)
        report = tops.fuse(model)
        assert fused_rules(report) == LAYERS
        want = results(exact)[1]
        for i, one in enumerate((model, plain)):
            grads = results(one)[1]
            assert {grad.dtype for grad in grads.values()} == {torch.float32}
            errors[i] += sum(float((grads[n] - g).norm() / g.norm()) for n, g in want.items())
    assert errors[0] <= 1.05 * errors[1]


def test_dropout_of_adapters() -> None:
    """In training each call drops other elements; the same ones again after the same seed."""
    model = adapted(lora_dropout=0.5)
    report = tops.fuse(model)
    model.train()
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(results(model)[0])
    assert losses[0] == losses[1] != losses[2]
    assert fused_rules(report) == LAYERS and not report.skipped
    plain = adapted(lora_dropout=0.5)
    assert_same(plain.eval(), model.eval())
    assert fused_rules(report) == LAYERS
    # One dropout alone drops: the statements of its product run.
    for one in (plain, model):
        one.get_submodule("base_model.model.model.layers.0.self_attn.v_proj.lora_dropout").train()
        torch.manual_seed(0)
        losses.append(results(one)[0])
    assert losses[-1] == pytest.approx(losses[-2], rel=5e-5)
    assert "drop with different probabilities" in reasons(report)


def dropouts_are_off(layer: Any) -> None:
    layer.lora_dropout.eval()


def a_dropout_that_is_off(layer: Any) -> None:
    layer.lora_dropout["default"] = torch.nn.Dropout(0.5).eval()


def another_cast(layer: Any) -> None:
    layer.lora_dropout.eval()
    layer._cast_input_dtype = lambda x, dtype: 2 * x


def no_adapters(layer: Any) -> None:
    layer.lora_dropout.eval()
    layer.lora_A.keys = dict().keys


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "edit", [dropouts_are_off, a_dropout_that_is_off, another_cast, no_adapters]
)
def test_edits_of_layers(edit: Callable[[Any], None], when: str) -> None:
    plain, model = adapted(lora_dropout=0.5), adapted(lora_dropout=0.5)
    if when == "after":
        tops.fuse(model)
        results(model)
    for one in (plain, model):
        for module in one.modules():
            if hasattr(module, "lora_dropout"):
                edit(module)
    tops.fuse(model)
    assert_same(plain, model)


def test_adapters_whose_ranks_differ() -> None:
    """The error names the layer, and the next call is right again."""
    plain, model = adapted(), adapted()
    tops.fuse(model)
    for one in (plain, model):
        b = one.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default")
        right, b.weight = b.weight, torch.nn.Parameter(torch.zeros(32, 3))
        with pytest.raises(RuntimeError) as error:
            one(**batch())
        b.weight = right
    assert str(error.value).startswith("[Linear] lora_b0 must have shape [32, 2], got [32, 3]")
    assert_same(plain, model)


@pytest.mark.parametrize(
    ("moved", "reason"),
    [
        ({"dtype": torch.bfloat16}, "its adapters have different dtypes"),
        ({"device": "meta"}, "its parameters are on cpu, meta"),
    ],
    ids=["dtype", "device"],
)
def test_one_adapter_of_another_kind(moved: dict[str, Any], reason: str) -> None:
    """The statements of its layer do what they do without ops."""
    plain, model = adapted(), adapted()
    report = tops.fuse(model)
    assert_same(plain, model)
    for one in (plain, model):
        layer = one.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
        for part in (layer.lora_A, layer.lora_B):
            part.default.to(**moved)
    if "dtype" in moved:
        # The last bit of bfloat16 depends on the order of a sum.
        assert_same(plain, model, tolerance=2**-8)
    else:
        with pytest.raises(RuntimeError) as want:
            results(plain)
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(want.value))}$"):
            results(model)
    assert reason in reasons(report)
    assert fused_rules(report)["layer"] == 1


def test_encoded_weights_that_ask_for_a_gradient() -> None:
    """Both models have the gradient, and no statement is lost."""
    model = adapted()
    tops.quantization.quantize_(model, "nvfp4", only="*.base_layer")
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    model.get_parameter(name).requires_grad_()
    plain = copy.deepcopy(model)
    tops.fuse(model)
    assert name in results(model)[1]
    assert_same(plain, model)


def test_training_saves_fewer_bytes_and_compiles() -> None:
    plain, model = adapted(), adapted()
    report = tops.fuse(model)
    before, after = report.saved_bytes(**batch())
    assert after < 0.72 * before
    compiled = torch.compile(model, fullgraph=True)
    for one in (plain, compiled):
        optimizer = torch.optim.SGD((p for p in one.parameters() if p.requires_grad), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            one(**batch()).loss.backward()
            optimizer.step()
    assert_same(plain, model, 5e-4)


def test_adapters_are_saved_and_loaded(tmp_path: Any) -> None:
    model = adapted()
    tops.fuse(model)
    results(model)
    model.save_pretrained(tmp_path)
    fused = base()
    report = tops.fuse(fused)
    loaded = peft.PeftModel.from_pretrained(fused, tmp_path, is_trainable=True)
    assert_same(model, loaded)
    assert fused_rules(report) == LAYERS


@pytest.mark.parametrize("targets", [["q", "v"], ["v"]], ids=str)
def test_biases_of_adapters_add_to_those_of_the_base(targets: list[str]) -> None:
    """Also beside a product without adapters, and with biases that are not zero."""

    def make() -> Any:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            **ENCODER, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
        names = [{"q": "query", "v": "value"}[one] for one in targets]
        model = adapted(
            transformers.BertForMaskedLM(config), target_modules=names, lora_bias=True, lora_alpha=3
        )
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        return model

    plain, model = make(), make()
    report = tops.fuse(model)
    assert_same(plain, model)
    assert any(name.endswith("lora_B.default.bias") for name in results(model)[1])
    assert {"layer", "attention"} & set(fused_rules(report))
    model.merge_adapter()
    plain.merge_adapter()
    assert_same(plain, model)
