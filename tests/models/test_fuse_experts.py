"""`fuse` on mixtures of experts of transformers, from small configurations with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from fuse_models import DECODER, assert_same_step, fused_rules, step_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=15)

MOE: dict[str, Any] = DECODER | {"intermediate_size": 48, "num_experts_per_tok": 2}
FOUR, LOCAL = {"num_experts": 4, "moe_intermediate_size": 24}, {"num_local_experts": 4}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
}
LATENT = DEEPSEEK | {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1}
# name -> (options, how many layers have experts)
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral": (LOCAL, 2),
    "Qwen2Moe": (FOUR | {"shared_expert_intermediate_size": 40}, 2),
    "Qwen3Moe": (FOUR | {"head_dim": 8}, 2),
    "Olmoe": (FOUR, 2),
    "FlexOlmo": (FOUR, 2),
    "DeepseekV2": (LATENT, 1),
    "DeepseekV3": (LATENT, 1),
    "Glm4Moe": (DEEPSEEK | {"head_dim": 8}, 1),
    "GraniteMoe": (LOCAL, 2),
    "GraniteMoeShared": (LOCAL | {"shared_intermediate_size": 40}, 2),
    "Phimoe": (LOCAL, 2),
    "Ernie4_5_Moe": (ERNIE, 1),
    "HunYuanMoEV1": (FOUR | {"moe_topk": 2, "head_dim": 8}, 2),
    "Cohere2Moe": (FOUR, 2),
    # A clamped unit.
    "HYV4": (DEEPSEEK, 1),
}
TOKENS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def make(name: str = "Mixtral", **options: Any) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**MOE | FAMILIES[name][0] | options)
    model = kind(config).train()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.2)  # so that experts are chosen clearly
    return model


def pair(name: str = "Mixtral", **options: Any) -> tuple[Any, Any, tops.FuseReport]:
    plain = make(name, **options)
    model = copy.deepcopy(plain)
    return plain, model, tops.fuse(model)


def given(tokens: Tensor = TOKENS, **options: Any) -> dict[str, Any]:
    return {"input_ids": tokens, "labels": tokens, **options}


def assert_same(plain: Any, model: Any, run: Any = None, **options: Any) -> None:
    assert_same_step(plain, model, given(**options), 2e-5, run)


def reasons(report: tops.FuseReport) -> list[str]:
    return [row.reason for row in report.skipped if row.rule == "experts"]


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients(name: str) -> None:
    plain, model, report = pair(name)
    assert fused_rules(report)["experts"] == FAMILIES[name][1]
    assert_same(plain, model)
    with torch.no_grad():
        want, found = (one.eval()(input_ids=TOKENS).logits for one in (plain, model))
    torch.testing.assert_close(found, want, rtol=5e-5, atol=5e-5)
    blocks = [one for one in model.modules() if hasattr(one, "fused") and hasattr(one, "experts")]
    assert len(blocks) == FAMILIES[name][1]
    assert all("Dispatch" in str(one.fused.explain()) for one in blocks)
    assert not reasons(report)


@pytest.mark.parametrize("name", ["Mixtral", "Olmoe"])
@pytest.mark.parametrize("count", [1, 2])
def test_few_tokens(name: str, count: int) -> None:
    """Most experts get no token, and their weights a gradient of zeros."""
    plain, model, _ = pair(name)
    assert_same(plain, model, tokens=torch.cat([TOKENS[:1, :count], TOKENS[:1, :1]], 1))


def test_generation() -> None:
    plain, model, _ = pair()
    found = [
        one.eval().generate(TOKENS[:1, :4], max_new_tokens=6, do_sample=False)
        for one in (plain, model)
    ]
    assert torch.equal(*found)


def block_results(block: Any, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    y = block(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_bfloat16(name: str) -> None:
    """Ops are as near to float32 as the statements are."""
    exact = make(name).bfloat16().model.layers[0].mlp
    plain, model = copy.deepcopy(exact), copy.deepcopy(exact)
    exact.float()
    assert fused_rules(tops.fuse(model)) == {"experts": 1}
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    # With the experts that the others choose.
    exact.gate.forward = lambda given: [
        tensor.float() if tensor.is_floating_point() else tensor
        for tensor in plain.gate(given.bfloat16())
    ]
    want = block_results(exact, x.float())[0]
    found = [block_results(block, x) for block in (plain, model)]
    plain_error, error = ((one[0].float() - want).norm() / want.norm() for one in found)
    assert error <= 1.2 * plain_error
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).norm() <= 1e-2 * one.float().norm()


def test_autocast() -> None:
    """It does not know the grouped products of torch, which compute in float32."""
    plain, model, _ = pair()
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    blocks = [one.model.layers[0].mlp for one in (plain, model)]
    for block in blocks:
        block.gate.forward = lambda given, gate=block.gate: type(gate).forward(gate, given.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, found = (block_results(block, x) for block in blocks)
    assert want[0].dtype == found[0].dtype == torch.float32
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_gradient_checkpoints() -> None:
    plain, model, _ = pair()
    for one in (plain, model):
        one.gradient_checkpointing_enable()
    assert_same(plain, model)


@pytest.mark.parametrize("name", ["Mixtral", "Olmoe"])
def test_compiled(name: str) -> None:
    plain, model, _ = pair(name)
    for one in (plain, model):
        one.loss_type = "ForCausalLM"  # else transformers warns, which ends a graph
    assert_same(plain, model, run=torch.compile(model, backend="aot_eager", fullgraph=True))


def test_router_logits_and_their_loss() -> None:
    plain, model, report = pair()
    assert_same(plain, model, output_router_logits=True)
    want, found = (one(TOKENS, output_router_logits=True) for one in (plain, model))
    torch.testing.assert_close(found.router_logits, want.router_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.aux_loss, want.aux_loss)
    assert fused_rules(report)["experts"] == 2


def test_adapters_on_attention() -> None:
    plain, model, report = pair()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for one in (plain, model):
        torch.manual_seed(1)
        peft.get_peft_model(one, config)
    assert_same(plain, model)
    assert fused_rules(report)["experts"] == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_on_experts(when: str) -> None:
    """They run as statements."""
    plain = make()
    model = copy.deepcopy(plain)
    config = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    if when == "after":
        tops.fuse(model)
        assert_same(plain, model)
    for one in (plain, model):
        torch.manual_seed(1)
        peft.get_peft_model(one, config)
    report = tops.fuse(model)
    assert_same(plain, model)
    assert "experts" not in fused_rules(report)


def sharded_experts(rank: int) -> None:
    """What each of two processes does for test_fuse_in_processes.py."""
    _, grads = step_of(make(), given())
    for is_first in (False, True):
        model = make()
        if is_first:
            report = tops.fuse(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if not is_first:
            report = tops.fuse(model)
        _, own = step_of(model, given())
        assert fused_rules(report)["experts"] == 2
        blocks = [layer.mlp for layer in model.model.layers]
        assert all(block.fused.regions[0].sequential is not None for block in blocks)
        for name, grad in grads.items():
            found: Any = own[name]
            assert (found.full_tensor() - grad).norm() <= 2e-5 * grad.norm() + 1e-7, name


# ---- what is left alone


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_another_implementation(implementation: str) -> None:
    plain, model, report = pair(experts_implementation=implementation)
    assert_same(plain, model)
    assert set(reasons(report)) == {f"its implementation is {implementation}"}
    for one in (plain, model):
        one.set_experts_implementation("grouped_mm")
    assert_same(plain, model)
    tops.fuse(model)
    assert fused_rules(report)["experts"] == 2
    model.set_experts_implementation(implementation)
    assert_same(plain, model)
    assert "experts" not in fused_rules(report)


def twice(*args: Any, **kwargs: Any) -> Tensor:
    return 2 * grouped_mm_experts_forward(*args, **kwargs)


@pytest.fixture
def other_function() -> Iterator[None]:
    yield
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm_experts_forward)
    ALL_EXPERTS_FUNCTIONS.pop("grouped_mm", None) if ALL_EXPERTS_FUNCTIONS._local_mapping else None


def register(model: Any) -> None:
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", twice)


def register_here(model: Any) -> None:
    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = twice


def hook(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(lambda module, args, output: 2 * output)


def doubled_gate(self: Any, given: Tensor) -> Tensor:
    gate, up = given.chunk(2, dim=-1)
    found: Tensor = self.act_fn(gate) * up * 2
    return found


def other_gate(model: Any) -> None:
    for layer in model.model.layers:
        kind = type(layer.mlp.experts)
        layer.mlp.experts.__class__ = type(kind.__name__, (kind,), {"_apply_gate": doubled_gate})


def other_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.Tanh()


def weight_of_another_class(model: Any) -> None:
    class Doubled(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*args, **(kwargs or {}))
                return 2 * found if function is torch.Tensor.transpose else found

    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.down_proj = Doubled(experts.down_proj.detach())


def parallel(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = True


def weight_in_a_buffer(model: Any) -> None:
    for layer in model.model.layers:
        experts = layer.mlp.experts
        weight = experts.down_proj.detach()
        del experts.down_proj
        experts.register_buffer("down_proj", weight)


# what changes -> the reason in the report
CHANGES: dict[Callable[[Any], None], str] = {
    register: "the function of grouped_mm is another one",
    register_here: "the function of grouped_mm is another one",
    hook: "MixtralExperts: it has hooks",
    other_gate: "the forward of MixtralExperts is not known",
    other_activation: "the forward of Tanh is not known",
    weight_in_a_buffer: "its down_proj is not among its parameters",
    weight_of_another_class: "MixtralExperts: its down_proj is a Doubled",
    parallel: "_is_expert_parallel is set",
}


@pytest.mark.usefixtures("other_function")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes(change: Callable[[Any], None], when: str) -> None:
    plain = make()
    model = copy.deepcopy(plain)
    if when == "after":
        tops.fuse(model)
        assert_same(plain, model)
    change(plain)
    if change not in (register, register_here):
        change(model)
    report = tops.fuse(model)
    assert_same(plain, model)
    assert "experts" not in fused_rules(report)
    if when == "before":
        assert set(reasons(report)) == {CHANGES[change]}


def test_rows_and_weights_of_two_dtypes() -> None:
    """The result has the dtype of the rows."""
    plain, model, _ = pair()
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    blocks = [one.model.layers[0].mlp for one in (plain, model)]
    for block in blocks:
        block(x)
        block.experts.down_proj.data = block.experts.down_proj.detach().bfloat16()
    want, found = (block_results(block, x) for block in blocks)
    torch.testing.assert_close(found, want)
    assert found[0].dtype == torch.float32


def test_transposed_weights_with_biases() -> None:
    config = transformers.GptOssConfig(**MOE | LOCAL | {"head_dim": 8})
    plain = transformers.GptOssForCausalLM(config)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = copy.deepcopy(plain)
    report = tops.fuse(model)
    assert_same(plain, model)
    assert set(reasons(report)) == {"has_bias is set"}


def clamped(model: Any) -> list[Any]:
    return [
        one for one in model.modules() if hasattr(one, "swiglu_limit") and hasattr(one, "down_proj")
    ]


def test_the_limit_of_a_clamped_unit() -> None:
    plain, model, report = pair("HYV4")
    for limit in (0.05, 0.5):
        for one in (plain, model):
            for experts in clamped(one):
                experts.swiglu_limit = limit
        assert_same(plain, model)
    assert fused_rules(report)["experts"] == 1


@pytest.mark.parametrize("name", ["Mixtral", "Olmoe"])
def test_saved_bytes(name: str) -> None:
    _, _, report = pair(name)
    before, after = report.saved_bytes(**given())
    assert after < 0.65 * before
