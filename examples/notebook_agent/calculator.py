"""A user-defined tool: a calculator for the four operations."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from mempipe.agents.tools import InvalidCall

MAX_CHARACTERS = 200
OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """Computes expressions such as "(3 + 4) * 12"."""

    name = "calculate"

    def schema(self) -> dict[str, Any]:
        """Returns what the policy reads about the tool, in OpenAI's form."""
        expression = {
            "type": "string",
            "description": "Numbers, + - * / and parentheses.",
            "maxLength": MAX_CHARACTERS,
        }
        parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
        return {"name": self.name, "description": "Computes an arithmetic expression.", "parameters": parameters}

    def check(self, arguments: dict[str, Any]) -> str:
        """Returns the expression. Raises InvalidCall for arguments that the schema does not allow, which ends the
        trajectory."""
        expression = arguments.get("expression")
        if arguments.keys() != {"expression"} or not isinstance(expression, str):
            raise InvalidCall("the one argument is expression, a text")
        if not expression.strip() or len(expression) > MAX_CHARACTERS:
            raise InvalidCall(f"expression has {len(expression)} characters, expected 1 to {MAX_CHARACTERS}")
        return expression.strip()

    async def call(self, arguments: str) -> list[str]:
        """Returns the line that the policy reads. A mistake such as a division by zero is a line as well, to learn
        from."""
        try:
            return [f"{arguments} = {evaluate(ast.parse(arguments, mode='eval').body):.10g}"]
        except ZeroDivisionError:
            return [f"{arguments} divides by zero"]
        except (SyntaxError, ValueError, OverflowError, RecursionError):
            return [f"{arguments} is not an expression of numbers, + - * / and parentheses that can be computed"]


def evaluate(node: ast.expr) -> float:
    """Returns the value of a parsed expression. Raises ValueError for anything but the four operations on numbers."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](evaluate(left), evaluate(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
    raise ValueError(f"{ast.dump(node)} is not arithmetic")
