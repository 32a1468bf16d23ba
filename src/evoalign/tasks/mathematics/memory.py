# SPDX-License-Identifier: Apache-2.0
"""What the libraries that read and compare answers keep from one answer to the next, put back before each of them.

Else the work that an answer takes, and with it whether that stays inside its bound, would depend on what a process has
graded before: a parser that has read a form once reads it with a fifth of the calls. The parser of ANTLR adds states
to automata that all parsers of a process share; sympy keeps results, factors and the state of a random generator, by
which it orders what it asks for. All are as they were when the `Memory` was made.
"""

from __future__ import annotations

from typing import Any


class Memory:
    """The libraries' memory as it is now."""

    def __init__(self) -> None:
        from latex2sympy2_extended.antlr_parser import PSLexer, PSParser

        kinds: list[Any] = [PSLexer, PSParser]
        dfas = [dfa for kind in kinds for dfa in kind.decisionsToDFA]
        self._automata = [(dfa, dfa.s0, dict(dfa._states), _edges(dfa)) for dfa in dfas]
        self._followed = [(state, state.nextTokenWithinRule) for kind in kinds for state in kind.atn.states if state]
        self._contexts = dict(kinds[1].sharedContextCache.cache)
        self._cache: dict[Any, Any] = kinds[1].sharedContextCache.cache

    def restore(self) -> None:
        """Put it back."""
        from math_verify import parser
        from sympy.core.cache import clear_cache
        from sympy.core.random import seed
        from sympy.ntheory.factor_ import factor_cache

        for dfa, start, states, edges in self._automata:
            dfa.s0 = start
            if len(dfa._states) > len(states):
                dfa._states = dict(states)
            for state, out in edges:
                state.edges = None if out is None else list(out)
        for state, tokens in self._followed:
            state.nextTokenWithinRule = tokens
        self._cache.clear()
        self._cache.update(self._contexts)
        parser.parse_latex_cached.cache_clear()
        clear_cache()
        factor_cache.cache_clear()
        seed(0)


def _edges(dfa: Any) -> list[tuple[Any, list[Any] | None]]:
    """The states of an automaton, each with where it leads by which token."""
    found = [dfa.s0, *dfa._states.values()]
    return [(state, None if state.edges is None else list(state.edges)) for state in found if state is not None]
