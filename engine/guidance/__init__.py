"""Grammars that constrain the output: JSON schema, JSON, regular expression, choice, EBNF."""

from engine.guidance.compiler import GrammarCompiler
from engine.guidance.matching import CompiledGrammar

__all__ = ["CompiledGrammar", "GrammarCompiler"]
