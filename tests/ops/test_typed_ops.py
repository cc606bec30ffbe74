"""torch.ops.transformer_ops.*: schema, fake implementation and autograd of every typed op."""

import ctypes
import platform

import pytest
import torch
from plan_calls import RUN_CALL
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from typed_op_samples import NAMES, RECOMPUTED, samples
from typed_op_samples import overload as op

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops._loader import build_info

pytestmark = pytest.mark.takes(seconds=180)

GLUS = {"glu", "geglu", "exact_geglu", "qgeglu", "reglu", "sreglu", "swiglu", "situglu"}
GLUS |= {"clamped_swiglu"}
# The largest samples whose derivatives are checked number by number.
MOST_NUMBERS = 256
# Ops whose results have no gradient: a call raises if autograd would record one.
WITHOUT_GRADIENT = {"linear_cross_entropy_backward"}


def is_backward(name):
    return name.endswith("_backward")


def saving(name, sample):
    """With all that a gradient reads."""
    fields = op(name)._schema.arguments
    return [
        True if field.name.startswith("save_") else value
        for field, value in zip(fields, sample, strict=True)
    ]


def away_from_zero(sample):
    """Where an output of an activation is zero, its slope jumps."""
    fill = lambda v: v.masked_fill(v == 0, 0.5) if v.is_floating_point() else v  # noqa: E731
    return tree_map_only(torch.Tensor, fill, list(sample))


def with_grad(name, sample):
    """All floating tensors require a gradient, but for those that get none."""
    constants = _C.constants_of(name)
    fields = op(name)._schema.arguments
    leaf = lambda v: v.clone().requires_grad_() if v.is_floating_point() else v  # noqa: E731
    return [
        value if field.name in constants else tree_map_only(torch.Tensor, leaf, value)
        for field, value in zip(fields, sample, strict=True)
    ]


def reads_seed(name, sample):
    """Whether its second derivative depends on the value of a tensor, which no tracer knows."""
    fields = op(name)._schema.arguments
    given = {field.name: value for field, value in zip(fields, sample, strict=True)}
    return "seed" in given and len(given["seed"]) > 0


def tensors_in(values):
    """All tensors, including those in lists."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def form(sample):
    """What of a sample the tracer sees: all but which activation it is, and which factor other than
    0 and 1."""
    alike = lambda v: isinstance(v, str) or (isinstance(v, float) and v not in (0, 1))  # noqa: E731
    return str(
        [
            (v.dim(), v.dtype) if isinstance(v, torch.Tensor) else type(v) if alike(v) else v
            for v in tree_leaves(list(sample))
        ]
    )


def is_traced(name):
    """Whether torch's check of traces can compare: random ops draw anew in each of its runs."""
    is_random = torch.Tag.nondeterministic_seeded in op(name).tags
    return not is_random and name not in {*WITHOUT_GRADIENT, *RECOMPUTED}


def may_be_traced(name, sample):
    return is_traced(name) and not reads_seed(name, sample)


def fullest(sample):
    """How much of a sample is there and switched on."""
    there = lambda v: v.numel() > 0 if isinstance(v, torch.Tensor) else bool(v)  # noqa: E731
    return sum(map(there, tree_leaves(list(sample))))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
    for sample in samples(name, torch.float32):
        if name in RECOMPUTED:
            # No gradient passes through those: plans call them in backward.
            torch.library.opcheck(RUN_CALL.default, op(name).arguments(*sample))
            continue
        torch.library.opcheck(op(name), tuple(sample), test_utils=tests)
        if name in WITHOUT_GRADIENT:
            with pytest.raises(NotImplementedError, match="must not require a gradient"):
                op(name)(*with_grad(name, sample))
    if traced := [s for s in samples(name, torch.float32) if may_be_traced(name, s)]:
        sample = max(traced, key=fullest)
        torch.library.opcheck(op(name), tuple(with_grad(name, saving(name, sample))))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if is_traced(name)])
def test_opcheck_of_every_form(name):
    forms = {form(s): s for s in samples(name, torch.float32) if may_be_traced(name, s)}
    assert forms or any(reads_seed(name, s) for s in samples(name, torch.float32))
    for sample in forms.values():
        torch.library.opcheck(op(name), tuple(with_grad(name, saving(name, sample))))


def size_of(sample):
    return sum(tensor.numel() for tensor in tensors_in(sample))


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    for number, sample in enumerate(sorted(samples(name), key=size_of)):
        sample = with_grad(name, away_from_zero(saving(name, sample)))
        leaves, spec = tree_flatten(sample)
        places = [
            i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.requires_grad
        ]
        # Next to a product of another dtype: too coarse for differences.
        if any(leaves[i].dtype != torch.float64 for i in places):
            continue

        def function(*tensors, leaves=leaves, spec=spec, places=places):
            values = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            torch.manual_seed(0)
            values = tree_unflatten(values, spec)
            # No gradient passes through the kernels of those.
            is_plain = name in RECOMPUTED
            results = _C.decomposition(name, tuple(values)) if is_plain else op(name)(*values)
            return tuple(r for r in tensors_in(results) if r.requires_grad)

        # Statistics depend on the input, but a backward op takes them as given.
        if (is_backward(name) and not consistent(name)) or name in WITHOUT_GRADIENT:
            continue
        # Every number of the smallest samples, and random directions of the others.
        tensors = [leaves[i] for i in places]
        fast = number >= 3 or size_of(sample) > MOST_NUMBERS
        assert torch.autograd.gradcheck(function, tensors, atol=1e-4, fast_mode=fast)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in {*WITHOUT_GRADIENT, *RECOMPUTED}])
def test_batches_of_gradients(name):
    for sample in samples(name):
        sample = with_grad(name, saving(name, sample))
        inputs, results = (
            [tensor for tensor in tensors_in(values) if tensor.requires_grad]
            for values in (sample, op(name)(*sample))
        )
        batches = [torch.randn(2, *result.shape, dtype=result.dtype) for result in results]

        def found(grads, is_batched, inputs=inputs, results=results):
            options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": is_batched}
            return tensors_in(torch.autograd.grad(results, inputs, grads, **options))

        if inputs and results:
            one_by_one = zip(
                *(found(grads, False) for grads in zip(*batches, strict=True)), strict=True
            )
            want = tuple(map(torch.stack, one_by_one))
            torch.testing.assert_close(found(batches, True), want)


def consistent(name):
    """Whether the op is a function of its tensors alone, each of them free to vary."""
    names = {a.name for a in op(name)._schema.arguments}
    return not names & {"mean", "rstd", "log_sum_exp"}


@pytest.mark.parametrize("name", NAMES)
def test_meta_gives_shapes_and_dtypes(name):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for sample in samples(name, dtype):
            real = op(name)(*sample)
            moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), list(sample))
            fake = op(name)(*moved)
            for a, b in zip(tensors_in(real), tensors_in(fake), strict=True):
                assert b.is_meta and a.shape == b.shape and a.dtype == b.dtype
                assert a.stride() == b.stride()


@pytest.mark.parametrize("name", NAMES)
def test_never_mutates_and_never_aliases(name):
    for sample in samples(name, torch.float32):
        tensors = tensors_in(list(sample))
        before = [tensor.clone() for tensor in tensors]
        results = tensors_in(op(name)(*sample))
        for tensor, copy in zip(tensors, before, strict=True):
            assert torch.equal(tensor, copy)
        storages = [t.untyped_storage()._cdata for t in (*tensors, *results) if t.numel()]
        assert len(storages) == len(set(storages))


@pytest.mark.parametrize("name", NAMES)
def test_decomposition(name):
    """The oracle of double backward and torch.func gives the numbers of the kernel."""
    if torch.Tag.nondeterministic_seeded in op(name).tags:
        return
    for sample in samples(name):
        got = tensors_in(op(name)(*sample))
        want = _C.decomposition(name, tuple(sample))
        for a, b in zip(got, want, strict=False):
            if b is not None:
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments_name_the_op(name):
    (sample, *_) = samples(name, torch.float32)
    # The values of the gradient do not matter to what is computed again.
    first = 1 if name.startswith("recompute_") else 0
    leaves, spec = tree_flatten(list(sample))
    for i, value in enumerate(leaves):
        if i < first or not isinstance(value, torch.Tensor) or value.dtype == torch.uint8:
            continue
        other = torch.int64 if value.is_floating_point() else torch.float32
        for bad in (value.to(other), value.to("meta"), value.new_zeros(5, 3, 7, 7)):
            arguments = tree_unflatten([*leaves[:i], bad, *leaves[i + 1 :]], spec)
            if i == first and bad.shape == (5, 3, 7, 7) and _takes_any_shape(name):
                continue
            if i == 0 and bad.is_meta and len(tensors_in(leaves)) == 1:
                continue
            with pytest.raises(RuntimeError, match=rf"^\[{name}\] .* must .*, got "):
                op(name)(*arguments)


def _takes_any_shape(name):
    tensors = [a for a in op(name)._schema.arguments if "Tensor" in str(a.type)]
    if name.startswith("recompute_"):
        tensors, name = tensors[1:], name.removeprefix("recompute_")
    return len(tensors) == 1 and name not in GLUS


@pytest.mark.cuda(backend=False)
@pytest.mark.parametrize("name", NAMES)
def test_on_cuda(name):
    """The numbers of the CPU; without the backend, how to build it."""
    for sample in samples(name):
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), list(sample))
        if build_info().CUDA is None:
            with pytest.raises(NotImplementedError, match="TRANSFORMER_OPS_CUDA=ON"):
                op(name)(*moved)
            continue
        results = tensors_in(op(name)(*moved)), tensors_in(op(name)(*sample))
        for got, want in zip(*results, strict=True):
            assert got.is_cuda
            # Torch's attention on CUDA drops other numbers.
            is_random = torch.Tag.nondeterministic_seeded in op(name).tags
            if not is_random and name != "attention_backward":
                torch.testing.assert_close(got.cpu(), want)


# ---- which library multiplies


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_which_library_multiplies(capfd):
    def calls_onednn(rows, enabled=True):
        x, w = torch.randn(rows, 512), torch.randn(512, 512)
        with (
            torch.backends.mkldnn.flags(enabled=enabled),
            torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON),
        ):
            op("linear")(x, w)
        ctypes.CDLL(None).fflush(None)
        return "exec,cpu,matmul" in capfd.readouterr().out

    wanted = tops.processor().prefers_onednn
    assert calls_onednn(64) or not wanted
    if platform.machine() == "x86_64":  # at::mm calls it elsewhere
        assert calls_onednn(64) == wanted
        assert not calls_onednn(63)
        assert not calls_onednn(64, enabled=False)
