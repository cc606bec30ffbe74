"""Threads that run and differentiate modules, while others edit, copy, explain and register.

Results are compared with those of one thread. At the end, processes are forked under load.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import random
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from helpers import as_tuple
from torch import Tensor
from user_fusions import JointSplit, replacing

import transformer_ops as tops

from .compare import Results, assert_all_near, gradients
from .models import LARGE, Features, Model, random_model
from .report import about_to

ISOLATED = True

WORKERS = 4
SECONDS = 1.5
FORKS = 3
# A forked child that takes longer is ended by a signal: it waits for a lock that is never released.
CHILD_SECONDS = 10
BATCHES = ((3,), (2, 3), *LARGE)


class Job:
    """A model with its own inputs, and the results on one thread."""

    def __init__(self, rng: random.Random) -> None:
        features = Features(python=rng.random() < 0.3, plain=rng.random() < 0.2)
        self.model: Model = random_model(rng, features, longest=6, batches=BATCHES)
        self.module = self.model.module
        self.inputs = [torch.randn(shape, dtype=torch.float64) for shape in self.model.shapes]
        for tensor in self.inputs:
            tensor.requires_grad_(rng.random() < 0.7)
        self.want = self.run(self.module)
        plans = self.module.plans()
        # Only a module that is one native group has this text; a joint step's name is in it twice.
        alone = len(plans) == 1 and all(piece.kind == "native" for piece in self.model.pieces)
        text = str(plans[0]) if alone else ""
        self.text = "" if " joint=true" in text else text

    def run(self, module: tops.Sequential) -> Results:
        outputs = as_tuple(module(*self.inputs))
        leaves = [t for t in (*self.inputs, *module.parameters()) if t.requires_grad]
        grads: list[Tensor | None] = [torch.ones_like(output) for output in outputs]
        return [*outputs, *gradients(outputs, leaves, grads)]

    def check(self, module: tops.Sequential) -> int:
        return assert_all_near(self.run(module), self.want, f"in a thread:\n{self.model}")

    def check_forward(self) -> int:
        with torch.no_grad():
            outputs = as_tuple(self.module(*self.inputs))
        return assert_all_near([*outputs], self.want[: len(outputs)], f"no_grad:\n{self.model}")


class Crowd:
    """Threads that run until time is up or one of them fails."""

    def __init__(self, jobs: list[Job], own: list[list[Job]], seed: int) -> None:
        self.jobs, self.own, self.seed = jobs, own, seed
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.checks = [0] * WORKERS

    def guarded(self, work: Callable[[random.Random, int], None], index: int) -> threading.Thread:
        rng = random.Random(f"{self.seed} {work.__name__} {index}")

        def loop() -> None:
            try:
                while not self.stop.is_set():
                    work(rng, index)
            except BaseException as error:
                self.errors.append(error)
                self.stop.set()

        return threading.Thread(target=loop, name=f"{work.__name__} {index}", daemon=True)

    def work(self, rng: random.Random, index: int) -> None:
        job = rng.choice(self.jobs if rng.random() < 0.6 else self.own[index])
        self.checks[index] += job.check(job.module) if rng.random() < 0.7 else job.check_forward()

    def run_texts(self, rng: random.Random, index: int) -> None:
        """Runs the programs of plans' texts; each new text is compiled."""
        job = rng.choice(self.jobs)
        if not job.text:
            time.sleep(0.001)
            return
        # Another name of a step gives another text.
        name = rng.choice(["same", f"step{rng.randrange(10**9)}"])
        text = re.sub(r"^forward [\w:]+ ops", f"forward {name} ops", job.text, count=1, flags=re.M)
        parameters = [p.detach() for p in job.module.parameters()]
        inputs = [tensor.detach() for tensor in job.inputs]
        found = torch.ops.transformer_ops.run_plan(text, inputs[0], inputs[1:], parameters)
        assert_all_near([*found], job.want[: len(found)], f"run_plan:\n{text}")

    def meddle(self, rng: random.Random, index: int) -> None:
        """Changes shared modules and the registry in ways that leave all results the same."""
        job = rng.choice(self.jobs)
        what = rng.choice([register, disable, edit, deep_copy, explain, trim, set_limit, switch])
        what(job, rng)

    def run(self, seconds: float) -> int:
        threads = [self.guarded(self.work, index) for index in range(WORKERS)]
        threads += [self.guarded(self.meddle, index) for index in range(2)]
        threads += [self.guarded(self.run_texts, index) for index in range(2)]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        children = [fork_and_plan(index) for index in range(FORKS)]
        self.stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"thread {thread.name} does not end"
        for status in map(wait_for, children):
            assert status == 0, f"a forked child ended with {status} instead of 0"
        if self.errors:
            raise self.errors[0]
        return sum(self.checks) + len(children)


# ---- what the other threads do


def unchanged(ops: list, **unused: object) -> list:
    return list(ops)


def register(job: Job, rng: random.Random) -> None:
    function = rng.choice([replacing(JointSplit, tops.BasicLinear, tops.SiLU), unchanged])
    name = f"by {threading.current_thread().name}"
    try:
        handle = tops.register_forward_backward_fusion(function, rng.random() < 0.5, name=name)
    except ValueError:  # the other thread has registered `unchanged`
        assert function is unchanged
        return
    with handle:
        job.check(job.module)


def disable(job: Job, rng: random.Random) -> None:
    with rng.choice(tops.fusions()).disabled():
        time.sleep(0.001)


def edit(job: Job, rng: random.Random) -> None:
    """Sets an attribute to its own value, so that all plans are made again."""
    for op in job.module:
        for name in ("eps", "scale", "p", "glu_interleave_size"):
            if hasattr(op, name):
                setattr(op, name, getattr(op, name))


def deep_copy(job: Job, rng: random.Random) -> None:
    job.check(copy.deepcopy(job.module))


def explain(job: Job, rng: random.Random) -> None:
    with unless_dropped():
        str(job.module.explain())
    with unless_dropped():
        assert all(tops.Plan.parse(str(plan)) == plan for plan in job.module.plans())


@contextmanager
def unless_dropped() -> Iterator[None]:
    """Another thread may just have dropped the plans that are being read."""
    try:
        yield
    except RuntimeError as error:
        if "must follow a call" not in str(error):
            raise


def trim(job: Job, rng: random.Random) -> None:
    tops.memory.trim()


def set_limit(job: Job, rng: random.Random) -> None:
    tops.memory.set_limit(rng.choice([0, 2**16, 2**24, 2**40]))


def switch(job: Job, rng: random.Random) -> None:
    job.module.recompute = rng.choice(["cheap", "none", "products"])


# ---- fork


def fork_and_plan(index: int) -> int:
    """A child that plans and runs a new module, then ends with 0."""
    child = os.fork()
    if child:
        return child
    # This is set in C, because a Python handler would also have to wait for the lock.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(CHILD_SECONDS)
    try:
        torch.set_num_threads(1)  # the OpenMP of the parent has no threads here
        module = tops.Sequential(tops.Linear(8, 8 + index), tops.GELU(), tops.Linear(8 + index, 4))
        x = torch.ones(2, 8, requires_grad=True)
        module(x)
        (text,) = map(str, module.plans())
        torch.ops.transformer_ops.run_plan(text, x.detach(), [], [*module.parameters()])
        tops.memory.trim()
        with tops.register_forward_fusion(unchanged, name=f"of child {index}"):
            module(x)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait_for(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_seed(seed: int) -> int:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    jobs = [Job(rng) for _ in range(3)]
    own = [[Job(rng)] for _ in range(WORKERS)]
    about_to("threads over\n" + "\n".join(str(job.model) for job in jobs))
    before = tops.memory.limit()
    try:
        return Crowd(jobs, own, seed).run(SECONDS)
    finally:
        tops.memory.set_limit(before)
