"""What an algorithm's methods must return. Anything else is an error that names the method, its file and its line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from fedloom.tree import Groups
from fedloom.user_code import kind_of, wrong_return

Method = Callable[..., Any]


def check_state(method: Method, found: Any, before: Groups) -> None:
    """Raise if a method did not return groups of named tensors, lost one of `before`, or changed the model's form."""
    _check_groups(method, found, "")
    for group, leaves in before.items():
        if group not in found:
            raise wrong_return(method, f"a state without '{group}', with {_listed(found)}", f"all of {_listed(before)}")
        if group == "model":  # others may grow and shrink, as a population in evolution does
            _check_alike(method, f"'{group}'", found[group], leaves, most=False)


def check_answer(method: Method, found: Any, kept: Groups, clients: int) -> None:
    """Raise if a client method did not return an update and what its clients keep, stacked over them."""
    if not isinstance(found, tuple) or len(found) != 2 or not hasattr(found[0], "groups"):
        needed = "an Update and what its clients keep, as in `return update, own`"
        raise wrong_return(method, kind_of(found), needed)
    update, own = found
    _check_groups(method, update.groups, "Update.groups", clients)
    _check_groups(method, {"public": update.public}, "Update", clients)
    for group in update.groups:
        weight = update.weight.get(group) if isinstance(update.weight, Mapping) else update.weight
        if not isinstance(weight, Tensor) or tuple(weight.shape) != (clients,):
            needed = f"a tensor with one weight for each of the {clients} clients"
            raise wrong_return(method, f"{kind_of(weight)} as the weight of '{group}'", needed)
    if isinstance(own, Mapping) and own.keys() != kept.keys():
        advice = "as init_own gives it. For another group, write an init_own that returns its first value, too"
        raise wrong_return(method, f"an own with {_listed(own)}", f"an own with {_listed(kept)}, {advice}")
    _check_groups(method, own, "own", clients)
    for group, leaves in kept.items():
        _check_alike(method, f"own['{group}']", own[group], leaves, most=True)


def _listed(groups: Iterable[Any]) -> str:
    return ", ".join(f"'{group}'" for group in groups) or "nothing"


def _check_groups(method: Method, found: Any, what: str, clients: int | None = None) -> None:
    """Raise if something is not a dict of dicts of tensors; with `clients`, their first dimension has one row each."""
    if not isinstance(found, Mapping):
        raise wrong_return(method, f"{kind_of(found)}{f' as {what}' if what else ''}", "a dict of named trees")
    for group, leaves in found.items():
        where = f"{what}['{group}']"
        if not isinstance(leaves, Mapping):
            raise wrong_return(method, f"{kind_of(leaves)} as {where}", "a tree there: a dict of named tensors")
        for name, leaf in leaves.items():
            if not isinstance(leaf, Tensor):
                raise wrong_return(method, f"{kind_of(leaf)} as {where}['{name}']", "a tensor there")
            if clients is not None and tuple(leaf.shape[:1]) != (clients,):
                needed = f"a row for each of the {clients} clients there, as the first dimension"
                raise wrong_return(method, f"{kind_of(leaf)} as {where}['{name}']", needed)


def _check_alike(method: Method, where: str, found: Any, before: Any, most: bool) -> None:
    """Raise if leaves of a tree are lost or have another shape or dtype, or if there are new ones and may not be."""
    missing, new = before.keys() - found.keys(), found.keys() - before.keys() if most else ()
    if missing or new:
        raise wrong_return(method, f"{where} with the leaves {_listed(found)}", f"the leaves {_listed(before)}")
    for name, leaf in before.items():
        if (found[name].shape, found[name].dtype) != (leaf.shape, leaf.dtype):
            raise wrong_return(method, f"{kind_of(found[name])} as {where}['{name}']", f"{kind_of(leaf)}, as it was")
