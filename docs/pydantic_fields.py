"""An extension of griffe for the reference page: the constructor of a pydantic class takes the fields of the class."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Expr, ExprName, Extension, Function, GriffeLoader, Parameter, ParameterKind, Parameters


class PydanticFields(Extension):
    """Give each class that derives from ``pydantic.BaseModel`` the ``__init__`` that pydantic makes of its fields."""

    def on_class(self, *, cls: Class, loader: GriffeLoader, **_: Any) -> None:
        """Replace ``__init__``: griffe reads sources, where a pydantic class has none or a catch-all one."""
        if not any(base.canonical_path == "pydantic.BaseModel" for base in cls.bases if isinstance(base, Expr)):
            return
        fields = [
            Parameter(
                name,
                kind=ParameterKind.keyword_only,
                annotation=_spelled(field.annotation, loader),
                default=field.value,
            )
            for name, field in cls.attributes.items()
            if "instance-attribute" in field.labels and field.annotation is not None
        ]
        parameters = Parameters(Parameter("self", kind=ParameterKind.positional_or_keyword), *fields)
        cls.set_member("__init__", Function("__init__", parameters=parameters, returns="None"))


def _spelled(annotation: str | Expr | None, loader: GriffeLoader) -> str:
    """Return an annotation with our aliases of types replaced by their values: readers choose among these."""
    text = str(annotation)
    for name in annotation.iterate() if isinstance(annotation, Expr) else ():
        if isinstance(name, ExprName) and name.canonical_path.startswith("moe_dispatch."):
            found = loader.modules_collection[name.canonical_path]
            text = text.replace(name.name, str(found.value)) if found.is_attribute else text
    return re.sub(r"Annotated\[(.+?), Field\((.*?)\)\]", _bounded, text)


def _bounded(found: re.Match[str]) -> str:
    """Return a type with its bounds, such as "int (>= 1)", instead of pydantic's ``Annotated[int, Field(ge=1)]``."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [limit.split("=", 1) for limit in found[2].split(", ")]
    told = ", ".join(f"{signs[name]} {value}" for name, value in limits if name in signs)
    return f"{found[1]} ({told})" if told else found[1]
