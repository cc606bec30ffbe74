"""Random classes of modules: statements that rules of `fuse` match, and others between them."""

from __future__ import annotations

import random

from .module_sources import (
    ATTENTION_CALLS,
    BLOCKS,
    CALLS,
    CAST,
    DECORATORS,
    FUNCTIONS,
    KINDS,
    NOISE,
    NUMBERS,
    PATTERNS,
    STATE,
    Node,
    Source,
)


class Writer:
    """Writes one class at random. Variables have the width D unless they are hidden."""

    def __init__(self, rng: random.Random, name: str = "Main") -> None:
        self.rng, self.name = rng, name
        self.inner = (
            Writer(rng, "Inner").source() if name == "Main" and rng.random() < 0.25 else None
        )
        self.noise = rng.choice([0.0, 0.03, 0.08, 0.2])
        self.odd = rng.choice([0.0, 0.0, 0.1, 0.4])
        self.reuses = rng.choice([0.1, 0.5])
        self.parts: dict[str, list[str]] = {}
        self.members: list[Node] = []
        self.init: list[Node] = []
        self.body: list[Node] = []
        self.known = ["x"]
        self.hidden: list[str] = []
        self.functions: list[str] = []
        self.made = 0
        self.methods = 0

    # ---- submodules and numbers

    def part(self, kind: str) -> str:
        """`self.name` of a submodule of this kind, an old one or a new one."""
        found = self.parts.setdefault(kind, [])
        if found and self.rng.random() < 0.3:
            return self.named(self.rng.choice(found))
        name = f"{kind}{len(found)}"
        found.append(name)
        usual, odd = KINDS[kind]
        text = self.rng.choice(odd if self.rng.random() < self.odd else usual)
        self.init.append(f"self.{name} = {text}")
        return self.named(name)

    def named(self, name: str) -> str:
        """The attribute, or a road to it."""
        if self.rng.random() >= self.odd * 0.3:
            return f"self.{name}"
        road = self.rng.choice(["property", "list", "dict", "modules", "getattr", "config"])
        other = f"{name}_{road}"
        if road == "property":
            self.members.append(f"@property\ndef {other}(self): return self.{name}")
            return f"self.{other}"
        if road == "dict":
            self.init.append(f"self.__dict__['{other}'] = self.{name}")
            return f"self.{other}"
        if road == "config":
            self.init.append(f"self.config.{other} = self.{name}")
            return f"self.config.{other}"
        if road == "getattr":
            return f"getattr(self, '{name}')"
        list_of = f"nn.ModuleList([self.{name}])" if road == "modules" else f"[self.{name}]"
        self.init.append(f"self.{other} = {list_of}")
        return f"self.{other}[0]"

    def number(self) -> str:
        """An expression for a factor."""
        value = self.rng.choice(NUMBERS if self.rng.random() < 0.4 else NUMBERS[:1])
        name = f"scale{self.made}"
        self.made += 1
        self.parts.setdefault("number", []).append(name)
        kind = self.rng.choice(
            ["own", "own", "own", "class", "property", "list", "config", "global"]
        )
        if kind == "own":
            self.init.append(f"self.{name} = {value}")
        elif kind == "class":
            plain = "0.5" if "nn." in value else value
            self.members.append(f"{name} = {plain}")
        elif kind == "property":
            self.init.append(f"self._{name} = {value}")
            self.members.append(f"@property\ndef {name}(self): return self._{name}")
        elif kind == "counting":
            self.init.append(f"self._{name} = {value}")
            self.members.append(
                (f"@property\ndef {name}(self):", ["self.n += 1", f"return self._{name}"])
            )
        elif kind == "list":
            self.init.append(f"self.{name} = [{value}]")
            return f"self.{name}[0]"
        elif kind == "config":
            self.init.append(f"self.config.{name} = {value}")
            return f"self.config.{name}"
        else:
            return self.rng.choice(["FACTOR", "SETTINGS.scale", "0.5"])
        return f"self.{name}"

    def factor(self) -> str:
        number = self.number()
        if self.rng.random() < 0.3:
            return f"@ * {number} if {number} is not None else @"
        return self.rng.choice([f"@ * {number}", f"{number} * @"])

    def act(self) -> str:
        if self.rng.random() < 0.4:
            return self.rng.choice(FUNCTIONS if self.rng.random() < 0.5 else FUNCTIONS[:5])
        return f"{self.part('act')}(@)"

    # ---- statements

    def new(self) -> str:
        if self.rng.random() < self.reuses:
            return self.rng.choice(["h", "h", "z", "x"])
        self.made += 1
        return f"v{self.made}"

    def emit(self, text: str | Node) -> None:
        self.body.append(text)
        while self.rng.random() < self.noise:
            self.add_noise()

    def assign(self, expression: str, hidden: bool = False) -> str:
        """A variable with this value."""
        name = self.new()
        own, others = (self.hidden, self.known) if hidden else (self.known, self.hidden)
        if name in others:
            others.remove(name)
        if not self.known:  # something has to be there for what follows
            name = f"h{self.made}"
        if name not in own:
            own.append(name)
        self.emit(f"{name} = {expression}")
        return name

    def any(self) -> str:
        return self.rng.choice(self.known or ["x"])

    def add_noise(self) -> None:
        rng = self.rng
        v, w = rng.choice([*self.known, *self.hidden]), self.any()
        self.made += 1
        n = f"n{self.made}"
        if self.functions and rng.random() < 0.5:
            f = rng.choice(self.functions)
            self.body.append(rng.choice(CALLS).format(f=f, v=v))
            return
        if rng.random() < 0.25:
            head, inner = rng.choice(BLOCKS)
            names = {"v": v, "w": w, "n": n}
            self.body.append((head.format(**names), [one.format(**names) for one in inner]))
            if head.startswith("def"):
                self.functions.append(n)
            return
        text = rng.choice(NOISE)
        kinds = [name for kind in ("lin", "up", "down") for name in self.parts.get(kind, [])]
        if "{p}" in text and not kinds:
            return
        p = f"self.{rng.choice(kinds)}" if kinds else ""
        self.body.append(text.format(v=v, w=w, n=n, p=p))
        if "lambda" in text and "{n}" in text:
            self.functions.append(n)
        elif text in ("{n} = {v}", "{n} = {v} * 2", "{n} = helper({v})") and v in self.known:
            self.known.append(n)

    def chain(self, source: str, steps: list[str]) -> str:
        """The expression of steps on a variable; some of them are statements."""
        expression, width = source, False
        splits = self.rng.choice([0.2, 0.6, 1.0])
        for step in steps:
            hidden = step.startswith("H:")
            step = step.removeprefix("H:")
            is_name = expression.isidentifier()
            if not is_name and (step.count("@") > 1 or self.rng.random() < splits):
                expression = self.assign(expression, width)
            expression, width = step.replace("@", expression), hidden
        return expression

    # ---- what rules match

    def steps(self) -> list[str]:
        """Steps from width D to width D."""
        rng = self.rng
        found = [f"{self.part('norm')}(@)"] if rng.random() < 0.6 else []
        kinds = ["mlp", "mlp", "gated", "halves", "module", "lin", "lin", "act", "attention"]
        kind = rng.choice(["inner"] if self.inner and rng.random() < 0.4 else kinds)
        if kind == "attention":
            found.append(f"{self.part(kind)}{rng.choice(ATTENTION_CALLS)}")
        elif kind == "inner":
            found += [f"{self.part(kind)}(@)"]
        elif kind == "mlp":
            found += [f"H:{self.part('up')}(@)", f"H:{self.act()}", f"{self.part('down')}(@)"]
        elif kind == "gated":
            gate, up, down = self.part("up"), self.part("up"), self.part("down")
            unit = [self.act().replace("@", f"{gate}(@)"), f"{up}(@)"]
            rng.shuffle(unit)
            found += [f"H:{unit[0]} * {unit[1]}", f"{down}(@)"]
        elif kind == "halves":
            halves = ["@.chunk(2, dim=-1)[0]", "@.chunk(2, dim=-1)[1]"]
            if rng.random() < 0.3:
                halves.reverse()
            unit = self.act().replace("@", halves[0]) + " * " + halves[1]
            found += [f"H:{self.part('both')}(@)", f"H:{unit}", f"{self.part('down')}(@)"]
        elif kind == "module":
            found += [f"{self.part('mlp')}(@)"]
        elif kind == "lin":
            found += [f"{self.part('lin' if rng.random() < 1 - self.odd else 'one')}(@)"]
        else:
            found += [f"{self.part('lin')}(@)", self.act(), f"{self.part('lin')}(@)"]
        for extra in ("drop", "scale", "number"):
            if rng.random() < 0.2:
                found.append(self.factor() if extra == "number" else f"{self.part(extra)}(@)")
        if rng.random() < 0.05:
            found.append(f"{self.part('lin')}(@)")
            found[-1] = CAST.replace("part", found[-1].removesuffix("(@)"))
        if rng.random() < 0.1:
            found.append(f"F.dropout(@, p={rng.choice(['0.0', 'self.p'])}, training=self.training)")
        return found

    def add_pattern(self) -> None:
        rng = self.rng
        kind = rng.choice(PATTERNS)
        source = self.any()
        if kind == "method" and self.methods < 2:
            self.add_method()
            return
        if kind == "rows":
            rows = self.assign(f"{source}.reshape(-1, {source}.size(-1))")
            value = self.chain(rows, self.steps())
            total = f"({rows} + {value}).view({source}.shape)"
            if rng.random() < 0.3:
                total = f"{self.part('norm')}({total})"
            self.assign(total)
            return
        if kind == "norm":
            self.assign(f"{self.part('norm')}({source})")
            return
        value = self.chain(source, self.steps())
        if kind == "plain":
            self.assign(value)
            return
        if rng.random() < 0.4 and not value.isidentifier():
            value = self.assign(value)
        other = source if kind != "sum" else rng.choice([self.any(), "y", self.any()])
        if kind == "parallel":
            other = f"{other} + {self.any()}"
        if kind == "cond":
            value = f"({value} if self.on else {source})"
        terms = [other, value]
        if rng.random() < 0.3:
            terms.reverse()
        total = " + ".join(terms)
        if kind == "normed":
            total = f"{self.part('norm')}({total})"
        if rng.random() < 0.6:
            if "x" not in self.known:
                self.known.append("x")
            self.emit(f"x = {total}")
        else:
            self.assign(total)

    def add_method(self) -> None:
        """A method of the class in which there are steps, and a call of it."""
        rng = self.rng
        kept = self.body, self.known, self.hidden, self.functions
        self.methods += 1
        self.body, self.known, self.hidden, self.functions = [], ["x"], [], []
        self.add_pattern()
        self.body.append(f"return {self.any()}")
        name = rng.choice(["ff_chunk", "feed_forward_chunk", "mix"]) + str(self.methods)[1:]
        self.members.append((f"def {name}(self, x, y=None):", self.body))
        self.body, self.known, self.hidden, self.functions = kept
        source = self.any()
        calls = [f"self.{name}({source})", f"self.{name}({source}, y)"]
        calls.append(f"apply_chunking_to_forward(self.{name}, self.chunk, 1, {source})")
        value = rng.choice(calls)
        self.assign(value if rng.random() < 0.5 else f"{source} + {value}")

    def source(self) -> Source:
        rng = self.rng
        if rng.random() < self.noise * 2:
            self.body.append(rng.choice(["global COUNT", "global G", "global h", "y = x", "h = x"]))
            if self.body[-1] == "h = x":
                self.known.append("h")
        if rng.random() < 0.4:
            self.body.append(("if y is None:", ["y = x"]))
            self.known.append("y")
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            self.add_pattern()
            while rng.random() < self.noise:
                self.add_noise()
        if rng.random() < self.noise and self.functions:
            self.body.append(f"note({rng.choice(self.functions)}())")
        last = self.any()
        ends = [f"return {last}", f"return {last}", "return x", f"return x, {self.any()}"]
        ends += [f"return {{'a': {last}, 'b': {self.any()}}}"]
        self.body.append(rng.choice(ends))
        config = "self.config, self.p = types.SimpleNamespace(**vars(SETTINGS)), 0.0"
        init = [*STATE, config, "self.chunk = 0", *self.init]
        decorators: list[Node] = [rng.choice(DECORATORS)] if rng.random() < 0.05 else []
        return Source(self.members, init, decorators, self.body, self.parts, self.inner, self.name)


def random_source(rng: random.Random) -> Source:
    return Writer(rng).source()
