"""Random Sequentials in float64 against plain torch, each in many ways to run and differentiate."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from helpers import as_tuple
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from user_fusions import Backward, ForwardSingle, ForwardSplit, JointSingle, JointSplit, replacing

import transformer_ops as tops

from .compare import Results, assert_all_near, gradients
from .models import BATCHES, LARGE, Features, Model, random_model

ISOLATED = False

# The shares of the models.
LARGE_SHARE, COMPILED_SHARE, EXPORTED_SHARE, FUSION_SHARE = 0.1, 0.02, 0.02, 0.15
View = Callable[[Tensor], Tensor]


# ---- inputs


def transposed(shape: tuple[int, ...]) -> tuple[tuple[int, ...], View]:
    return shape[::-1], lambda base: base.permute(*reversed(range(base.dim())))


def expanded(shape: tuple[int, ...]) -> tuple[tuple[int, ...], View]:
    return (1,) * (len(shape) - 1) + shape[-1:], lambda base: base.expand(shape)


def sliced(shape: tuple[int, ...]) -> tuple[tuple[int, ...], View]:
    return (*shape[:-1], 2 * shape[-1] + 1), lambda base: base[..., 1::2]


def as_it_is(shape: tuple[int, ...]) -> tuple[tuple[int, ...], View]:
    return shape, lambda base: base


LAYOUTS = (as_it_is, as_it_is, as_it_is, transposed, expanded, sliced)


@dataclass
class Trial:
    """A model with inputs and output gradients, and the results of plain torch."""

    model: Model
    bases: list[Tensor]
    views: list[tuple[int, View]]  # for each input: its base, and what makes it of that
    grads: list[Tensor | None]  # None: the loss leaves the output out
    seed: int
    want: Results

    @property
    def module(self) -> tops.Sequential:
        return self.model.module

    def inputs(self, bases: list[Tensor] | None = None) -> list[Tensor]:
        found = self.bases if bases is None else bases
        return [view(found[i]) for i, view in self.views]

    def leaves(self, module: nn.Module | None = None) -> list[Tensor]:
        parameters = (self.module if module is None else module).parameters()
        return [t for t in (*self.bases, *parameters) if t.requires_grad]

    def call(self, function: Callable[..., object] | None = None) -> tuple[Tensor, ...]:
        """The outputs, always from the same generator state."""
        inputs = self.inputs()
        torch.manual_seed(self.seed)
        return as_tuple((self.module if function is None else function)(*inputs))

    def results(self, outputs: tuple[Tensor, ...], module: nn.Module | None = None) -> Results:
        return [*outputs, *gradients(outputs, self.leaves(module), self.grads)]

    def plain(self) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The outputs of the reference, and the leaves that they depend on."""
        own = {id(p): p.detach().clone() for p in self.module.parameters()}
        bases = [base.detach().clone() for base in self.bases]
        leaves = []
        for real, twin in zip(
            (*self.bases, *self.module.parameters()), (*bases, *own.values()), strict=True
        ):
            if real.requires_grad:
                leaves.append(twin.requires_grad_())
        parameters = {n: own[id(p)] for n, p in self.model.all_parameters().items()}
        torch.manual_seed(self.seed)
        return self.model.meaning(self.inputs(bases), parameters), leaves

    def plain_results(self) -> Results:
        outputs, leaves = self.plain()
        return [*outputs, *gradients(outputs, leaves, self.grads)]


def make_trial(rng: random.Random, seed: int, features: Features) -> Trial:
    batches = LARGE if rng.random() < LARGE_SHARE else BATCHES
    model = random_model(rng, features, batches=batches)
    bases: list[Tensor] = []
    views: list[tuple[int, View]] = []
    for shape in model.shapes:
        known = [i for i, base in enumerate(bases) if base.shape == shape]
        if known and rng.random() < 0.2:  # an input that comes twice
            views.append((rng.choice(known), lambda base: base))
            continue
        base_shape, view = rng.choice(LAYOUTS)(shape)
        bases.append(torch.randn(base_shape, dtype=torch.float64).requires_grad_())
        views.append((len(bases) - 1, view))
    if rng.random() < 0.4:  # some frozen
        for tensor in (*bases, *model.module.parameters()):
            tensor.requires_grad_(rng.random() < 0.6)
    trial = Trial(model, bases, views, [], seed, [])
    trial.grads = [random_gradient(rng, output) for output in trial.plain()[0]]
    trial.want = trial.plain_results()
    return trial


def random_gradient(rng: random.Random, output: Tensor) -> Tensor | None:
    kind = rng.random()
    if kind < 0.2:
        return None
    if kind < 0.4:
        return torch.randn((), dtype=torch.float64).expand(output.shape)
    return torch.randn(output.shape, dtype=torch.float64)


# ---- ways to run a trial. Each returns the number of results that it compared.


def check(trial: Trial, results: Results, what: str) -> int:
    # The result of a Python op for missing gradients is the user's choice.
    zeros = trial.model.has_python
    return assert_all_near(results, trial.want, what, zeros_for_none=zeros)


def twice(trial: Trial) -> int:
    outputs = trial.call()
    leaves = trial.leaves()
    first = gradients(outputs, leaves, trial.grads, retain_graph=True)
    again = gradients(outputs, leaves, trial.grads)
    count = check(trial, [*outputs, *first], "the first backward")
    return count + check(trial, [*outputs, *again], "the second backward")


def checkpointed(trial: Trial) -> int:
    outputs = trial.call(lambda *inputs: checkpoint(trial.module, *inputs, use_reentrant=False))
    return check(trial, trial.results(outputs), "checkpoint")


def checkpointed_reentrant(trial: Trial) -> int:
    inputs = trial.inputs()
    if not any(tensor.requires_grad for tensor in inputs):
        return 0  # such a checkpoint gives no gradient to parameters alone
    outputs = trial.call(lambda *inputs: checkpoint(trial.module, *inputs, use_reentrant=True))
    leaves = trial.leaves()
    for leaf in leaves:
        leaf.grad = None
    live = [
        (o, g) for o, g in zip(outputs, trial.grads, strict=True) if g is not None and o.grad_fn
    ]
    if not live:
        return 0
    torch.autograd.backward([o for o, _ in live], [g.clone() for _, g in live])
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    # It returns zeros for outputs that no loss uses.
    results = [*outputs, *found]
    return assert_all_near(results, trial.want, "reentrant checkpoint", zeros_for_none=True)


def without_gradients(trial: Trial) -> int:
    count = 0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = trial.call()
        made = [output for output in outputs if not is_an_input(trial, output)]
        assert not any(output.requires_grad for output in made), mode.__name__
        count += assert_all_near([*outputs], trial.want[: len(outputs)], mode.__name__)
    return count


def with_hooks_that_copy(trial: Trial) -> int:
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        outputs = trial.call()
    return check(trial, trial.results(outputs), "saved tensors that are copies")


def with_hooks_that_watch(trial: Trial) -> int:
    def unpack(packed: tuple[Tensor, Tensor]) -> Tensor:
        kept, copied = packed
        assert torch.equal(kept, copied) or kept.isnan().any(), "a saved tensor was overwritten"
        return kept

    with saved_tensors_hooks(lambda t: (t, t.detach().clone()), unpack):
        outputs = trial.call()
    return check(trial, trial.results(outputs), "saved tensors that are kept")


def double_backward(trial: Trial) -> int:
    try:
        got = second_gradients(trial.call(), trial.leaves(), trial.grads)
    except RuntimeError as error:
        # A Python op or fusion has no decomposition that could be differentiated twice.
        assert "Python steps have no second derivative" in str(error), f"double backward: {error}"
        return 1
    want = second_gradients(*trial.plain(), trial.grads)
    if trial.model.has_python and got is None:
        return 1
    return assert_all_near(got or [], want or [], "double backward", 1e-6)


def second_gradients(
    outputs: tuple[Tensor, ...], leaves: list[Tensor], grads: list[Tensor | None]
) -> Results | None:
    first = gradients(outputs, leaves, grads, create_graph=True)
    live = [grad for grad in first if grad is not None and grad.requires_grad]
    loss = sum((grad.square().sum() for grad in live), torch.zeros(()))
    if not loss.requires_grad:
        return [None if leaf is None else torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def right_or_refused(trial: Trial, change: Callable[[tuple[Tensor, ...]], None], what: str) -> int:
    """Changes tensors in place before backward. The result is an error, or gradients as if they had
    not changed."""
    outputs = trial.call()
    before = [output.detach().clone() for output in outputs]
    state = [t.detach().clone() for t in (*trial.bases, *trial.module.parameters())]
    try:
        with torch.no_grad():
            change(outputs)
        found = gradients(outputs, trial.leaves(), trial.grads)
    except RuntimeError as error:
        allowed = (
            "modified by an inplace operation",
            "modified inplace",
            "a view",
            "more than one",
        )
        assert any(text in str(error) for text in allowed), f"{what}: {error}"
        found = None
    finally:
        with torch.no_grad():
            for tensor, value in zip(
                (*trial.bases, *trial.module.parameters()), state, strict=True
            ):
                tensor.copy_(value)
    return 1 if found is None else check(trial, [*before, *found], what)


def overwritten_outputs(trial: Trial) -> int:
    def change(outputs: tuple[Tensor, ...]) -> None:
        for output in outputs:
            output.mul_(3.0)

    # If an output is the input itself, this would change the input, too.
    if any(is_an_input(trial, output) for output in trial.call()):
        return 0
    return right_or_refused(trial, change, "outputs changed before backward")


def is_an_input(trial: Trial, output: Tensor) -> bool:
    """Whether the output shares an input's memory, as those of MakeExtraOutput and Identity do."""
    storage = output.untyped_storage()._cdata
    return any(base.untyped_storage()._cdata == storage for base in trial.bases)


def overwritten_inputs(trial: Trial) -> int:
    def change(outputs: tuple[Tensor, ...]) -> None:
        for base in trial.bases:
            base.mul_(3.0)

    if any(is_an_input(trial, output) for output in trial.call()):
        return 0
    return right_or_refused(trial, change, "inputs changed before backward")


def overwritten_weights(trial: Trial) -> int:
    def change(outputs: tuple[Tensor, ...]) -> None:
        for parameter in trial.module.parameters():
            parameter.mul_(3.0)

    return right_or_refused(trial, change, "weights changed before backward")


def with_mutation_allowed(trial: Trial) -> int:
    with allow_mutation_on_saved_tensors():
        outputs = trial.call()
        before = [output.detach().clone() for output in outputs]
        state = [p.detach().clone() for p in trial.module.parameters()]
        with torch.no_grad():
            for parameter in trial.module.parameters():
                parameter.mul_(3.0)
        found = gradients(outputs, trial.leaves(), trial.grads)
    with torch.no_grad():
        for parameter, value in zip(trial.module.parameters(), state, strict=True):
            parameter.copy_(value)
    return check(trial, [*before, *found], "allow_mutation_on_saved_tensors")


def copied(trial: Trial) -> int:
    twin = copy.deepcopy(trial.module)
    return check(trial, trial.results(trial.call(twin), twin), "deepcopy")


def called_functionally(trial: Trial) -> int:
    module = trial.module
    twins = {id(p): p.detach().clone().requires_grad_(p.requires_grad) for p in module.parameters()}
    given = {name: twins[id(p)] for name, p in module.named_parameters()}
    outputs = trial.call(lambda *inputs: torch.func.functional_call(module, given, inputs))
    leaves = [t for t in (*trial.bases, *twins.values()) if t.requires_grad]
    return check(trial, [*outputs, *gradients(outputs, leaves, trial.grads)], "functional_call")


def with_anomaly_mode(trial: Trial) -> int:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return check(trial, trial.results(trial.call()), "anomaly mode")


def leaf_by_leaf(trial: Trial) -> int:
    outputs = trial.call()
    found = [
        gradients(outputs, [leaf], trial.grads, retain_graph=True)[0] for leaf in trial.leaves()
    ]
    return check(trial, [*outputs, *found], "one autograd.grad a leaf")


def accumulated(trial: Trial) -> int:
    """backward() adds to .grad, twice."""
    # If the views of two leaves are added, torch itself gives both the same memory as .grad.
    outputs = trial.call(
        lambda *inputs: trial.module(*(i * 1 if i._is_view() else i for i in inputs))
    )
    leaves = trial.leaves()
    live = [
        (o, g)
        for o, g in zip(outputs, trial.grads, strict=True)
        if g is not None and o.requires_grad
    ]
    if not live or not leaves:
        return 0
    for _ in range(2):
        given = [g.clone() for _, g in live]
        torch.autograd.backward([o for o, _ in live], given, retain_graph=True)
    found = [None if leaf.grad is None else leaf.grad / 2 for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return check(trial, [*outputs, *found], "backward() twice")


def by_vjp(trial: Trial) -> int:
    """torch.func, which runs the decomposition; its dropout is torch's own."""
    if trial.model.has_python or trial.model.draws:
        return 0
    torch.manual_seed(trial.seed)
    try:
        outputs, pull = torch.func.vjp(
            lambda *bases: as_tuple(trial.module(*trial.inputs(list(bases)))), *trial.bases
        )
    except RuntimeError as error:
        # A user's fusion fits, and its steps are Python.
        assert "torch.func transforms must run over native ops only" in str(error), error
        return 1
    given = tuple(
        torch.zeros_like(o) if g is None else g for o, g in zip(outputs, trial.grads, strict=True)
    )
    live = iter(trial.want[len(outputs) :])
    count = assert_all_near([*outputs], trial.want[: len(outputs)], "torch.func.vjp")
    for base, grad in zip(trial.bases, pull(given), strict=True):
        if base.requires_grad:
            want = next(live)
            zeros = torch.zeros_like(base) if want is None else want
            count += assert_all_near([grad], [zeros.detach()], "torch.func.vjp")
    return count


WAYS = (
    twice,
    checkpointed,
    checkpointed_reentrant,
    without_gradients,
    with_hooks_that_copy,
    with_hooks_that_watch,
    double_backward,
    overwritten_outputs,
    overwritten_inputs,
    overwritten_weights,
    with_mutation_allowed,
    copied,
    called_functionally,
    with_anomaly_mode,
    leaf_by_leaf,
    accumulated,
    by_vjp,
)


# ---- slow ways, for few models


def compiled(trial: Trial, *, dynamic: bool) -> int:
    torch._dynamo.reset()
    whole = not trial.model.has_python
    fast = torch.compile(trial.module, fullgraph=whole, backend="aot_eager", dynamic=dynamic)
    # AOTAutograd returns zeros for outputs that no loss uses, also in plain torch.
    results = trial.results(trial.call(fast))
    return assert_all_near(results, trial.want, "torch.compile", zeros_for_none=True)


def exported(trial: Trial, *, frozen: bool) -> int:
    """Its plan must return the gradients that the call wants, not those of the export."""
    if trial.model.has_python or any(0 in shape for shape in trial.model.shapes):
        return 0
    module = copy.deepcopy(trial.module)
    if frozen:
        module.requires_grad_(False)
    inputs = tuple(tensor.detach() for tensor in trial.inputs())
    program = torch.export.export(module, inputs).module()
    twins = dict(program.named_parameters(remove_duplicate=False))
    leaves = [base for base in trial.bases if base.requires_grad]
    for name, parameter in trial.module.named_parameters():
        twins[name].requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            leaves.append(twins[name])
    outputs = trial.call(program)
    return check(trial, [*outputs, *gradients(outputs, leaves, trial.grads)], "torch.export")


# ---- a seed


@contextmanager
def random_fusions(rng: random.Random) -> Iterator[list[str]]:
    """Sometimes registers a user's fusion."""
    registers = {
        tops.register_forward_fusion: (ForwardSplit, ForwardSingle),
        tops.register_backward_fusion: (Backward,),
        tops.register_forward_backward_fusion: (JointSplit, JointSingle),
    }
    with ExitStack() as stack:
        names = []
        if rng.random() < FUSION_SHARE:
            register = rng.choice(list(registers))
            fused = rng.choice(registers[register])
            names.append(fused.__name__)
            stack.enter_context(register(replacing(fused, tops.BasicLinear, tops.SiLU)))
        yield names


def random_features(rng: random.Random) -> Features:
    return Features(
        python=rng.random() < 0.35,
        plain=rng.random() < 0.35,
        random=rng.random() < 0.3,
        hooks=True,
        ties=True,
        layouts=True,
    )


def run_seed(seed: int) -> int:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    trial = make_trial(rng, seed, random_features(rng))
    ways: list[Callable[[Trial], int]] = rng.sample(WAYS, len(WAYS))
    if rng.random() < COMPILED_SHARE:
        dynamic = rng.random() < 0.5
        ways.append(lambda trial: compiled(trial, dynamic=dynamic))
    if rng.random() < EXPORTED_SHARE:
        frozen = rng.random() < 0.5
        ways.append(lambda trial: exported(trial, frozen=frozen))
    count = 0
    with random_fusions(rng) as fusions:
        for way in ways:
            try:
                count += way(trial)
            except Exception as error:
                name = way.__name__
                text = f"{name}: {error}\n{trial.model}\nfusions: {fusions}"
                raise AssertionError(text) from error
    return count
