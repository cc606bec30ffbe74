"""Methods with calls of ops in place of the statements that rules match.

In: a function and its sites. Out: a function in which the statements of site i became

    if (_tops_found := self._tops_region(i, x)) is not None:
        x = _tops_found(x)
    else:
        x = x + self.mlp(self.norm(x))

Lines of a traceback stay those of the file.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from .pattern import INPUT, Arguments
from .sites import Site
from .statements import function_from, tree_of, variables_in
from .windows import blocks_of

__all__ = ["rewritten"]

PLAIN = "_tops_plain"  # the variable that has the function before it was rewritten


def rewritten(function: Any, sites: tuple[Site, ...], method: str) -> Any:
    """The function with, at each site, `region = self._tops_region(i)`, and either a call of it or
    the statements; and before them, a call of what the class has now, where somebody replaced the
    method, or of the function, where somebody stored the method and called `unfuse`. Lines, globals
    and closure are those of the function."""
    tree = copy.deepcopy(tree_of(function))
    assert tree is not None
    text = isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant)
    body = tree.body[text:]
    own = [(i, site) for i, site in enumerate(sites) if site.rule.method == method]
    for place, block in reversed(list(enumerate(blocks_of(body)))):
        of_block = [(i, site) for i, site in own if site.found.window.block == place]
        block[:] = _with_choices(block, 0, of_block)
    tree.body = [*tree.body[:text], *_calls_of_others(tree, method), *body]
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [default and ast.Constant(None) for default in tree.args.kw_defaults]
    made = function_from(tree, function, {PLAIN: function})
    made.__kwdefaults__ = function.__kwdefaults__
    made.__annotations__ = dict(function.__annotations__)
    made.__doc__ = function.__doc__
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _calls_of_others(tree: ast.FunctionDef, method: str) -> list[ast.stmt]:
    given = tree.args
    own, *arguments = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if given.vararg is not None:
        arguments.append(f"*{given.vararg.arg}")
    arguments += [f"{argument.arg}={argument.arg}" for argument in given.kwonlyargs]
    if given.kwarg is not None:
        arguments.append(f"**{given.kwarg.arg}")
    call = f"({', '.join([own, *arguments])})"
    source = (
        f"if not hasattr({own}, '_tops_base'):\n"
        f"    return {PLAIN}{call}\n"
        f"if {own}._tops_base.{method} is not {own}._tops_methods[{method!r}]:\n"
        f"    return {own}._tops_base.{method}{call}"
    )
    found = ast.parse(source)
    for node in ast.walk(found):
        ast.copy_location(node, tree.body[0])
    return found.body


def _with_choices(
    statements: list[ast.stmt], first: int, sites: list[tuple[int, Site]]
) -> list[ast.stmt]:
    """Statements of a block, from number `first` on, with these sites in place of theirs. Sites may
    contain each other."""
    found: list[ast.stmt] = []
    at = 0
    while at < len(statements):
        here = [(i, site) for i, site in sites if site.found.window.start == first + at]
        if not here:
            found.append(statements[at])
            at += 1
            continue
        outer = max(here, key=lambda pair: pair[1].found.window.end)
        window = outer[1].found.window
        end = window.end - first
        inside = [
            (i, site)
            for i, site in sites
            if (i, site) != outer and window.start <= site.found.window.start < window.end
        ]
        found += _choice(*outer, _with_choices(statements[at:end], window.start, inside))
        at = end
    return found


_ASKS = "output_attentions"


def _weights(site: Site, arguments: Arguments) -> str:
    """Whether the weights of attention are read later; None where they are, but the call of the
    method says that nobody wants them."""
    if arguments.is_first and not site.found.window.others:
        return "False"
    code = site.source.function.__code__
    tree = tree_of(site.source.function)
    has_argument = _ASKS in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    is_kept = tree is not None and _ASKS not in variables_in(tree, ast.Store)
    return f"{_ASKS} is not False or None" if has_argument and is_kept else "True"


def _choice(i: int, site: Site, statements: list[ast.stmt]) -> list[ast.stmt]:
    names, window = site.found.names, site.found.window
    extra = [names[key] for key in site.pattern.inputs if key != INPUT]
    what = "return" if window.value.target is None else f"{window.value.target} ="
    arguments, source = site.arguments, names[INPUT]
    # What is more than a name is computed once.
    input = source if source.isidentifier() else "_tops_input"
    given_input = source if input == source else f"({input} := {source})"
    if arguments is None:
        condition = f"self._tops_region({', '.join([str(i), given_input, *extra])})"
        call = f"_tops_found({', '.join([input, *extra])})"
    else:
        args = "".join(f"{ast.unparse(argument)}, " for argument in arguments.args)
        keywords = ", ".join(ast.unparse(keyword) for keyword in arguments.keywords)
        others = "".join(f"{name}, " for name in extra)
        given = f"({others}), ({args}), dict({keywords}), {_weights(site, arguments)}"
        condition = f"self._tops_attention({i}, {given_input}, {given})"
        call = f"self._tops_run({', '.join(['_tops_found', input, *extra])})"
    others = "".join(f"    {name} = None\n" for name in sorted(window.others))
    tests = " and ".join([*map(str, window.assumed), f"(_tops_found := {condition}) is not None"])
    text = f"if {tests}:\n{others}    {what} {call}"
    choice = ast.parse(text).body[0]
    assert isinstance(choice, ast.If)
    for node in ast.walk(choice):
        ast.copy_location(node, statements[0])
    choice.orelse = statements
    return [choice]
