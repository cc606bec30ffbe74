"""explain(): text, table and picture of plans, and bytes that are true."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import explained, saved_bytes
from torch import Tensor, nn

import transformer_ops as tops

GELU_MLP = """\
328 bytes a row saved for backward; a row of the input is 16 x float32

0  LayerNorm    (16,), eps=1e-05
1  BasicLinear  in_features=16, out_features=64
2  Bias         size=64
3  GELU
4  BasicLinear  in_features=64, out_features=16
5  Bias         size=16

forward   op                    made by                 saves, bytes a row
  0       LayerNorm             -                       0.input 64, 0.mean 4,
                                                        0.rstd 4
  1-3     BasicLinear + Bias +  linear_bias_activation  3.input 256
          GELU
  4-5     BasicLinear + Bias    linear_epilogue

backward  op                    made by                 reads
  5       Bias                  -
  2-4     Bias + GELU +         linear_activation       3.input
          BasicLinear
  1       BasicLinear           -                       computes x1 again from
                                                        0.input, 0.mean, 0.rstd
  0       LayerNorm             -                       0.input, 0.mean, 0.rstd
""".rstrip()


class ScaledLinear(tops.FusedOperation):
    """(x W^T) * scale, with two tensors of its own kept for backward."""

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        linear, scale = self.basic_ops
        product = nn.functional.linear(input_, linear.weight)
        return product * scale.scale, [(), ()], (input_, linear.weight, product.sum(-1))

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        input_, weight, _ = basic_op_ctxs[0].saved_tensors
        grad = grad_output * self.basic_ops[1].scale
        return grad @ weight, [(grad.T @ input_,), ()], [(), ()]


def fuse_scaled_linear(ops: list[Any], **unused: Any) -> list[Any]:
    kinds = [type(op) for op in ops]
    for i in range(len(ops) - 1):
        if kinds[i : i + 2] == [tops.BasicLinear, tops.ConstantScale]:
            return [*ops[:i], ScaledLinear(ops[i : i + 2]), *ops[i + 2 :]]
    return ops


def gelu_mlp() -> tops.Sequential:
    return tops.Sequential(
        tops.LayerNorm(16), tops.Linear(16, 64), tops.GELU(), tops.Linear(64, 16)
    )


def relu_mlp() -> tops.Sequential:
    first, second = tops.Linear(16, 64, bias=False), tops.Linear(64, 16, bias=False)
    return tops.Sequential(tops.RMSNorm(16), first, tops.ReLU(), second)


def residual_block(channel: str = "residual") -> tops.Sequential:
    split = tops.MakeExtraOutput().set_extra_output_channel(0, channel, output_to_caller=False)
    join = tops.AddExtraInput().set_extra_input_channel(0, channel)
    return tops.Sequential(split, *gelu_mlp(), tops.Dropout(0.1), join)


def called(module: Any, *shape: int, **factory: Any) -> Any:
    module(torch.randn(*shape or (6, 16), requires_grad=True, **factory))
    return module.explain()


# ---- text


def test_text_of_a_block() -> None:
    explanation = called(gelu_mlp())
    assert str(explanation) == GELU_MLP
    assert repr(explanation) == GELU_MLP


@pytest.mark.parametrize("recompute", ["cheap", "none"])
def test_text_fits_a_terminal(recompute: str) -> None:
    options = {"num_kv_heads": 2, "head_dim": 16, "causal": True, "scale": 0.25}
    attention = [
        tops.PackedLinear(64, (64, 32, 32)),
        tops.RoPE(16, 6),
        tops.Attention(4, **options),
        tops.Linear(64, 64),
    ]
    module = tops.Sequential(
        tops.Residual(tops.LayerNorm(64), *attention),
        tops.Residual(tops.RMSNorm(64), tops.Linear(64, 128), tops.SwiGLU(), tops.Linear(64, 64)),
        nn.Softmax(-1),
        tops.GELU(),
        recompute=recompute,
    )
    module[3].register_forward_hook(lambda *unused: None)
    table = torch.randn(5, 16)
    module(torch.randn(2, 5, 64, requires_grad=True), table, table)
    lines = str(module.explain()).splitlines()
    assert max(map(len, lines)) <= 80
    assert "scale=0.25" in " ".join(lines) and "GELU has forward hooks" in " ".join(lines)


def test_fuser_explains_as_sequential_does() -> None:
    group = tops.OperationFuser(list(gelu_mlp()))
    assert str(called(group)) == GELU_MLP


def test_joint_step_is_named_in_both_passes() -> None:
    text = str(called(relu_mlp()))
    line = "  2-3     ReLU + BasicLinear  activation_linear (joint)  "
    assert [row for row in text.splitlines() if row.startswith(line)] == [
        line + "3.input 256",
        line + "3.input",
    ]


def test_channel_is_shown() -> None:
    assert "'residual' goes from op 0 to op 8" in str(called(residual_block()))


def test_extra_tensors_are_shown() -> None:
    module = tops.Sequential(tops.AddExtraInput(), tops.MakeExtraOutput())
    module(torch.randn(3, 4), torch.randn(3, 4))
    assert "extra input 0 goes to op 0" in str(module.explain())
    assert "extra output 0 comes from op 1" in str(module.explain())


def test_user_fusion_is_named() -> None:
    module = tops.Sequential(tops.BasicLinear(16, 8), tops.ConstantScale(0.5), tops.GELU())
    with tops.register_forward_backward_fusion(fuse_scaled_linear):
        row = called(module).groups[0].forward[0]
    assert row.runs == "ScaledLinear(BasicLinear, ConstantScale)"
    assert row.made_by == f"fuse_scaled_linear (joint, from {__name__})"


def test_without_gradients_nothing_is_kept() -> None:
    module = gelu_mlp()
    with torch.no_grad():
        module(torch.randn(6, 16))
    text = str(module.explain())
    assert text.startswith("no gradient is needed, nothing is saved\n")
    assert "\nbackward" not in text and "(backward)" not in text


def test_ops_before_the_first_gradient_are_marked() -> None:
    module = tops.Sequential(tops.GELU(), tops.Linear(16, 8))
    module(torch.randn(2, 16))
    assert module.explain().groups[0].backward[0].skipped
    assert "needs no gradient" in str(module.explain())


# ---- near misses


def reasons(explanation: Any, fusion: str) -> list[str]:
    group = explanation.groups[0]
    return [miss.reason for miss in group.near_misses if miss.fusion == fusion]


def all_reasons(explanation: Any, fusion: str) -> list[str]:
    misses = explanation.plans[0].near_misses
    return [miss.reason for miss in misses if miss.fusion == fusion]


def test_reason_another_kind() -> None:
    explanation = called(tops.Sequential(tops.ReLU(), tops.GELU()))
    expected = ["op 1 is GELU where it needs BasicLinear"]
    assert all_reasons(explanation, "activation_linear") == expected
    # One op of a pattern fits everywhere.
    assert reasons(explanation, "activation_linear") == []


def test_the_nearest_miss_of_a_users_fusion_is_told() -> None:
    class Tail(tops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
            raise AssertionError

        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
            raise AssertionError

    expected = ["op 3 is BasicLinear where it needs ConstantScale"]
    kinds = [tops.RMSNorm, tops.BasicLinear, tops.ReLU, tops.ConstantScale]
    with tops.register_forward_backward_fusion(Tail, pattern=kinds):
        explanation = called(relu_mlp())
    assert reasons(explanation, "Tail") == all_reasons(explanation, "Tail") == expected
    with tops.register_forward_backward_fusion(Tail, pattern=kinds[1:]):
        explanation = called(relu_mlp())
    assert reasons(explanation, "Tail") == expected
    assert len(all_reasons(explanation, "Tail")) > 1


def test_reason_taken_by_an_earlier_rule() -> None:
    explanation = called(relu_mlp())
    assert all_reasons(explanation, "linear_epilogue") == [
        "op 2 is ReLU where it needs Bias or ConstantScale or AddExtraInput"
    ]
    module = tops.Sequential(tops.Linear(16, 64), tops.ReLU(), tops.Linear(64, 16, bias=False))
    taken = ["op 2 is taken by activation_linear"]
    assert reasons(called(module), "linear_bias_activation") == taken


def test_reason_of_a_guard() -> None:
    module = relu_mlp()
    module[3].weight.requires_grad_(False)
    expected = "the weight needs no gradient, so the Linear saves no input"
    assert reasons(called(module), "activation_linear") == [expected]
    assert f"activation_linear (joint) at 2-3: {expected}" in explained(module)


def fuse_linears(ops: list[Any], **unused: Any) -> list[Any]:
    """Never fires: rules see the basic ops of a Linear."""
    return [ScaledLinear([op]) if isinstance(op, tops.Linear) else op for op in ops]


@pytest.mark.parametrize("pass_name", ["forward", "backward", "forward_backward"])
def test_a_function_that_changed_nothing(pass_name: str) -> None:
    register = getattr(tops, f"register_{pass_name}_fusion")
    module = tops.Sequential(tops.Linear(16, 8), tops.GELU())
    with register(fuse_linears):
        explanation = called(module)
    expected = (
        "it changed nothing of [BasicLinear, Bias, GELU]; it is given the basic ops of a Linear; "
        "compare with isinstance, as these have subclasses: LinearProduct, LinearBias"
    )
    assert reasons(explanation, "fuse_linears") == [expected]
    (miss,) = (miss for miss in module.plans()[0].near_misses if miss.fusion == "fuse_linears")
    assert (miss.pass_name, miss.ops) == (pass_name, (0, 1, 2))
    label = {"forward_backward": "joint"}.get(pass_name, pass_name)
    start = f"fuse_linears ({label}) at 0-2: it changed nothing of [BasicLinear, Bias, GELU]"
    for shown in (explained(module), explanation._repr_html_(), explanation.svg()):
        assert start in shown
    # Nobody else: neither a function that did change something, nor one that is gone.
    assert reasons(called(module), "fuse_linears") == []
    module = tops.Sequential(tops.BasicLinear(16, 8), tops.ConstantScale(0.5), tops.GELU())
    with tops.register_forward_backward_fusion(fuse_scaled_linear):
        assert reasons(called(module), "fuse_scaled_linear") == []
        assert reasons(called(tops.Sequential(tops.GELU())), "fuse_scaled_linear") == [
            "it changed nothing of [GELU]"
        ]


# ---- hooks


def test_hooks_keep_a_module_in_a_group_of_its_own() -> None:
    module = gelu_mlp()
    module[2].register_forward_hook(lambda *unused: None)
    explanation = called(module)
    note = "GELU has forward hooks, which keep it in a group of its own"
    assert [group.note for group in explanation.groups] == ["", note, ""]
    assert note in str(explanation) and note in explanation.svg()
    assert note in explanation._repr_html_()


def test_hooks_in_a_fuser() -> None:
    ops = list(gelu_mlp())
    group = tops.OperationFuser(ops)
    ops[2].register_full_backward_hook(lambda *unused: None)
    notes = [part.note for part in called(group).groups]
    assert notes == ["", "GELU has backward hooks, which keep it in a group of its own", ""]


def test_plain_modules_stand_between_groups() -> None:
    text = str(called(tops.Sequential(tops.GELU(), nn.Softmax(-1), tops.GELU())))
    assert "module 1: Softmax, not a fusible op" in text
    assert "group 0: " in text and "group 1: " in text


# ---- bytes


BLOCKS = {
    "gelu": gelu_mlp,
    "relu": relu_mlp,
    "residual": residual_block,
    "norm over two dimensions": lambda: tops.Sequential(tops.RMSNorm((3, 16)), tops.SwiGLU()),
    "reshape": lambda: tops.Sequential(
        tops.GELU(), tops.Reshape((-1, 8)), tops.L2Normalization(), tops.BasicLinear(8, 4)
    ),
    "one tensor for two ops": lambda: tops.Sequential(
        tops.MakeExtraOutput(), tops.SiLU(), tops.Identity(), tops.ReLU(), tops.ConstantScale(2.0)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_are_those_that_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    module = BLOCKS[name]().to(dtype)
    x = torch.randn(5, 3, 16, dtype=dtype, requires_grad=True)
    measured = saved_bytes(module, x)
    (group,) = module.explain().groups
    assert group.saved.total == measured
    assert group.saved_a_row == pytest.approx(measured / 15)
    slots = [slot for row in group.forward for slot in row.saves]
    assert sum(slot.bytes for slot in slots) == pytest.approx(measured / 15)


def test_bytes_under_autocast() -> None:
    module = gelu_mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = saved_bytes(module, torch.randn(6, 16, requires_grad=True))
    assert module.explain().groups[0].saved.total == measured


def test_bytes_of_frozen_parameters() -> None:
    module = gelu_mlp()
    module[3].weight.requires_grad_(False)
    measured = saved_bytes(module, torch.randn(6, 16, requires_grad=True))
    assert module.explain().groups[0].saved.total == measured


@pytest.mark.parametrize("order", ["scaled last", "native after"])
def test_bytes_of_python_steps(order: str) -> None:
    ops: list[Any] = [tops.RMSNorm(16), tops.BasicLinear(16, 8), tops.ConstantScale(0.5)]
    module = tops.Sequential(*ops, *([tops.GELU()] if order == "native after" else []))
    with tops.register_forward_backward_fusion(fuse_scaled_linear):
        measured = saved_bytes(module, torch.randn(6, 16, requires_grad=True))
        (group,) = module.explain().groups
    assert group.saved.total == measured
    assert [slot.full_name for slot in group.forward[1].saves] == ["1.saved0", "1.saved2"]


def test_bytes_follow_the_last_call() -> None:
    module = tops.Sequential(tops.ReLU())
    assert called(module, 4, 64).groups[0].saved_a_row == 8
    assert called(module, 2, 3, 8).groups[0].saved_a_row == 1


def test_bytes_without_rows() -> None:
    assert called(gelu_mlp(), 0, 16).groups[0].saved.total == 0
    assert called(tops.Sequential(tops.GELU()), 7).groups[0].saved_a_row == 28


def test_bytes_of_a_compiled_call() -> None:
    module = gelu_mlp()
    torch.compile(module, fullgraph=True, backend="aot_eager")(
        torch.randn(4, 16, requires_grad=True)
    )
    assert str(module.explain()) == GELU_MLP


def test_slots_of_the_declarations_say_the_same() -> None:
    """Declared bits of each saved slot, which the reference table shows, against a real call."""
    norms = [tops.LayerNorm(24), tops.RMSNorm(24), tops.L2Normalization()]
    elementwise = [tops.GELU(), tops.ReLU(), tops.SReLU(), tops.SwiGLU(), tops.Dropout(0.5)]
    for op in [*norms, *elementwise, tops.BasicLinear(24, 8)]:
        for dtype in (torch.float32, torch.float64):
            op.to(dtype)
            module = tops.Sequential(op)
            (group,) = called(module, 8, 24, dtype=dtype).groups
            for slot in (slot for row in group.forward for slot in row.saves):
                bits = tops._C.slot_bits(op._kind, slot.name, 24, dtype.itemsize * 8)
                assert slot.bytes == bits / 8, (op, slot)


# ---- table and picture


def test_table_is_small_and_escaped() -> None:
    table = called(residual_block("<b>&"))._repr_html_()
    assert "&lt;b&gt;&amp;" in table and "<b>" not in table
    assert "<table>" in table and "linear_bias_activation" in table
    ElementTree.fromstring(table.replace("<br>", "<br/>"))


@pytest.mark.parametrize("name", BLOCKS)
def test_picture_is_well_formed_and_stands_alone(name: str, tmp_path: Any) -> None:
    path = tmp_path / "plan.svg"
    explanation = called(BLOCKS[name](), 5, 3, 16)
    explanation.save(path)
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<script" not in text and "@import" not in text and "href" not in text
    assert text.count("http") == 1  # the name of the SVG namespace
    shown = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"forward", "backward", "ops", "kept"} <= shown
    for step in (*explanation.plans[0].forward, *explanation.plans[0].backward):
        assert step.name in shown


def test_picture_shows_bytes_joint_steps_and_fused_objects() -> None:
    module = tops.Sequential(*relu_mlp(), tops.BasicLinear(16, 8), tops.ConstantScale(0.5))
    with tops.register_forward_backward_fusion(fuse_scaled_linear):
        picture = called(module).svg()
    assert ">input 256 B<" in picture and ">joint<" in picture
    assert ">joint, by fuse_scaled_linear<" in picture and ">ScaledLinear<" in picture


def test_picture_escapes_any_name() -> None:
    picture = called(residual_block('<script>&"\x00\ud800')).svg()
    ElementTree.fromstring(picture)
    assert "<script" not in picture and "&lt;script&gt;" in picture
    picture.encode("utf-8")


def test_suffix_must_be_svg(tmp_path: Any) -> None:
    explanation = called(gelu_mlp())
    with pytest.raises(ValueError, match=r"\[explain\] path must end in .svg, got .*plan.png"):
        explanation.save(tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError):
        explanation.save(tmp_path / "missing" / "plan.svg")


# ---- what the documentation shows


def test_plan_in_the_architecture_page_is_a_real_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = next(b for b in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if b[:4] == "plan")
    module = tops.Sequential(tops.Linear(16, 32), tops.ReLU(), tops.Dropout(0.1))
    assert str(called(module).plans[0]) == shown
    assert str(tops.Plan.parse(shown)) == shown


def test_picture_in_the_documentation_is_what_save_draws() -> None:
    split = tops.MakeExtraOutput()
    split.set_extra_output_channel(0, "residual", output_to_caller=False)
    join = tops.AddExtraInput().set_extra_input_channel(0, "residual")
    first, second = tops.Linear(64, 256, bias=False), tops.Linear(256, 64)
    norm, dropout = tops.RMSNorm(64), tops.Dropout(0.1)
    module = tops.Sequential(split, norm, first, tops.ReLU(), second, dropout, join)
    path = Path(__file__).parents[2] / "docs" / "plan.svg"
    assert path.read_text(encoding="utf-8") == called(module, 8, 64).svg(), "save it again"
