"""What dropout draws: probability, independence, and the generator's state."""

import pytest
import torch
from helpers import every_device, every_dtype
from op_cases import run_seeded

import transformer_ops as tops


@every_device
@every_dtype
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_frequency_and_scale(p, dtype, device):
    y = tops.Dropout(p)(torch.ones(400, 1000, dtype=dtype, device=device)).cpu()
    kept = (y != 0).double()
    assert abs(kept.mean().item() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    scale = torch.tensor(1 / (1 - p), dtype=torch.float64).to(dtype)
    assert set(y.unique().tolist()) == {0.0, scale.item()}
    # Neither rows nor columns nor neighbours hang together.
    assert (kept.mean(0) - (1 - p)).abs().max() < 6 * (p * (1 - p) / 400) ** 0.5
    assert (kept.mean(1) - (1 - p)).abs().max() < 6 * (p * (1 - p) / 1000) ** 0.5
    centred = (kept - kept.mean()).flatten()
    for lag in (1, 2, 4, 8, 32, 1000):
        correlation = (centred[lag:] * centred[:-lag]).mean() / centred.square().mean()
        assert abs(correlation.item()) < 0.01


def generator_of(device):
    return torch.cuda.default_generators[0] if device == "cuda" else torch.default_generator


@every_device
def test_the_generator_decides(device):
    op, x = tops.Dropout(0.5), torch.ones(64, 64, device=device)
    generator = generator_of(device)
    first, second = op(x), op(x)
    assert not torch.equal(first, second)
    assert torch.equal(run_seeded(op, x), run_seeded(op, x))
    state = generator.get_state()
    want = op(x)
    generator.set_state(state)
    assert torch.equal(op(x), want)
    with torch.random.fork_rng():
        op(x)
        assert not torch.equal(op(x), want)
    after = generator.get_state()
    assert not torch.equal(after, state)
    generator.set_state(state)
    op(x)
    assert torch.equal(generator.get_state(), after)


@every_device
@pytest.mark.parametrize("make", [lambda: tops.Dropout(0.0), lambda: tops.Dropout(0.5).eval()])
def test_off_draws_nothing_and_hands_its_input_on(make, device):
    op, x = make(), torch.randn(4, 4, device=device)
    state = generator_of(device).get_state()
    assert op(x).data_ptr() == x.data_ptr()
    assert torch.equal(generator_of(device).get_state(), state)


@every_device
def test_all_dropped(device):
    x = torch.full((3, 4), float("inf"), device=device, requires_grad=True)
    y = tops.Dropout(1.0)(x)
    y.sum().backward()
    assert not y.any() and not x.grad.any()


@pytest.mark.parametrize(
    ("op", "width"),
    [
        (tops.Dropout(0.5), 4),
        (tops.Attention(1, head_dim=4, p=0.5), 12),  # one key for each query, which is NaN
    ],
)
def test_what_is_dropped_is_0_also_if_it_was_nan(pytestconfig, op, width):
    if width == 12 and pytestconfig.getoption("--emulate-cuda") is not None:
        pytest.skip("attention on CUDA is torch's, which multiplies by 0")
    x = torch.ones(64, 1, width)
    x[..., :4] = torch.nan
    out = op(x)
    assert (out == 0).any() and out.isnan().any()
    assert ((out == 0) | out.isnan()).all()


def test_number_of_threads_does_not_matter():
    op, x = tops.Dropout(0.3), torch.ones(517, 331)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run_seeded(op, x))
    assert all(torch.equal(result, results[0]) for result in results)


@every_device
def test_two_dropouts_of_one_pipeline_differ(device):
    x = torch.ones(64, 64, device=device)
    y = tops.Sequential(tops.Dropout(0.5), tops.MakeExtraOutput(), tops.Dropout(0.5))(x)
    kept_twice = (y[0] != 0).double().mean()
    assert abs(kept_twice - 0.25) < 0.05


def test_a_call_that_raises_draws_nothing():
    module = tops.Sequential(tops.Dropout(0.5), tops.Linear(8, 4))
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="must have last dimension 8"):
        module(torch.randn(3, 7))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    bad = torch.ones(3, 7)
    with pytest.raises(RuntimeError):
        module(bad)
    assert torch.equal(torch.get_rng_state(), state)
