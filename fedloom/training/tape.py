"""Record a computation once and replay it on the same memory, without autograd, module calls or new tensors.

In a small training step, half of the time goes to Python and autograd, which choose the same few dozen kernels every
time. A tape runs the step once under a dispatch mode that records every kernel with the tensors it read and wrote. To
replay the step, copy new data into the inputs; then the same kernels run on the same tensors. Views need no replay,
because memory never moves.

The kernels are torch's own, so a replayed step gives the same bits as the step itself. `fused` gives this up for speed
in one case: if a tensor is changed by a multiple of a matrix product that nothing else reads, as plain SGD changes a
weight matrix, the product is added to the tensor directly. It is rounded once less and never stored.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fedloom.training import generators
from fedloom.training.modules import set_value
from fedloom.tree import is_whole

aten = torch.ops.aten
Memory = int  # the address of a storage: tensors with the same one share memory
Call = Callable[[], Any]

# these use only the shape of their first argument, not its values
_SHAPE_ONLY = {aten.ones_like, aten.zeros_like, aten.full_like, aten.empty_like}
_SHAPE_ONLY |= {aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty}
_PRODUCTS = {aten.mm.default: Tensor.addmm_, aten.bmm.default: Tensor.baddbmm_}
_ROWS = aten.embedding_dense_backward.default
_RESIZES = {aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy}  # these enlarge their output for a while
_IN_PLACE_SUMS = (aten.add_.Tensor, aten._foreach_add_.List)
_NOT_FOR_OUT = {"dtype", "layout", "device", "pin_memory", "memory_format"}  # the result's memory decides all this


class CannotRecord(Exception):
    """The computation depends on values that only Python sees, on shapes that depend on data, or on a generator."""


@dataclass(eq=False)
class Kernel:
    """One call of a torch operator, with the memory that it read and wrote."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor | None, ...]
    reads: frozenset[Memory]
    writes: frozenset[Memory]

    @property
    def in_place(self) -> bool:
        return self.writes <= self.reads


class Tape:
    """The kernels with which a function changed tensors that exist outside it.

    >>> x, total = torch.zeros(2), torch.zeros(())
    >>> tape = record(lambda x, total: total.add_((x * x).sum()), x, total)
    >>> _ = x.copy_(torch.tensor([3.0, 4.0]))
    >>> with torch.no_grad():
    ...     tape.replay()
    >>> total
    tensor(25.)
    """

    def __init__(self, kernels: Sequence[Kernel], keep: object = None) -> None:
        self.kernels = _needed(_without_constants(kernels))
        self._keep = keep if keep is not None else kernels  # keeps constants and views alive
        with torch.no_grad():
            self._calls = [_call(kernel) for kernel in self.kernels]

    def __len__(self) -> int:
        """Return the number of kernels in a replay."""
        return len(self._calls)

    def replay(self) -> None:
        """Run the kernels again. Gradients must be off."""
        for call in self._calls:
            call()

    def fused(self) -> Tape:
        """Return a tape on the same memory that adds products directly to the tensors they change."""
        return Tape(_fused(self.kernels), self._keep)


def record(computation: Callable[..., Any], *given: Any) -> Tape:
    """Run a computation once on some tensors (alone, or in dicts and lists), and record what it does to them.

    It gets sealed tensors: they compute, but Python cannot read any value in them. So the recording cannot depend on
    values. The computation may change these tensors and nothing else.
    """
    sealed: dict[int, Sealed] = {}
    recorder = _Recorder({_memory(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)})
    arguments = tree_map_only(Tensor, lambda leaf: sealed.setdefault(id(leaf), Sealed(leaf)), given)
    _recording.now = True
    try:
        with torch.enable_grad(), recorder:
            computation(*arguments)
    finally:
        _recording.now = False
    return Tape(recorder.kernels)


def recorded(
    computation: Callable[..., Any],
    given: Sequence[Any],
    inputs: Sequence[Tensor],
    changes: Callable[[], Sequence[Tensor]],
    others: Sequence[Tensor],
) -> Tape:
    """Return a fused tape of a computation on the tensors `given`. It reads `inputs` and changes `changes`.

    A trial with the values `others` in `inputs` must give the same bits as the computation itself, and almost the same
    when fused. Afterwards all values are restored. Raise CannotRecord if there is no such tape.
    """
    with torch.no_grad():
        before = [leaf.clone() for leaf in changes()]
        was = [value.clone() for value in inputs]
        places = [leaf.data_ptr() for leaf in changes()]

    def tried(attempt: Callable[[], Any]) -> list[Tensor]:
        with torch.no_grad():
            for leaf, value in zip(changes(), before, strict=True):
                set_value(leaf, value * 1.25 if value.is_floating_point() or value.is_complex() else value)
            for value, other in zip(inputs, others, strict=True):
                value.copy_(other)
            attempt()
            return [leaf.clone() for leaf in changes()]

    try:
        drawn = generators.positions()
        tape = record(computation, *given)
        if drawn != generators.positions():
            raise CannotRecord("the step draws from a global generator")
        done, replayed = tried(torch.enable_grad()(lambda: computation(*given))), tried(tape.replay)
        fused = tape.fused()
        almost = tried(fused.replay)
        if places != [leaf.data_ptr() for leaf in changes()]:
            raise CannotRecord("the step gives its tensors other memory")
        for one, other, near in zip(done, replayed, almost, strict=True):
            if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
                raise CannotRecord("a trial on other values gave something else than the step itself")
            # the decision must not depend on which client comes first, so rounding must never cause a refusal
            rough = 64 * torch.finfo(one.dtype).eps if not is_whole(one) else 0.0
            if not torch.allclose(one, near, rtol=max(rough, 1e-3), atol=max(rough, 1e-4), equal_nan=True):
                raise CannotRecord("a trial with products added directly gave something else than the step itself")
        return fused
    except CannotRecord:
        raise
    except Exception as error:  # if the computation itself is wrong, running it without a tape reports that
        raise CannotRecord(str(error).strip().partition("\n")[0] or type(error).__name__) from error
    finally:
        with torch.no_grad():
            for leaf, value in zip((*changes(), *inputs), (*before, *was), strict=True):
                set_value(leaf, value)


_recording = threading.local()  # whether this thread records


def _way_out(name: str) -> Any:
    """Return a method that lets Python read values only after the recording."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_recording, "now", False):
            raise CannotRecord("the step reads values into Python")
        return getattr(self._inside, name)(*args, **kwargs)  # left from a recording, for example in a cache

    return method


class Sealed(Tensor):
    """A tensor that computes like the one inside it, but has no memory from which Python could read values.

    After the recording it behaves as an ordinary tensor: a library may keep a constant from a recording in its cache.
    """

    _inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Sealed:
        made: Sealed = Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=inside.device,
            requires_grad=inside.requires_grad,
        )
        made._inside = inside.detach()
        torch._C._set_throw_on_mutable_data_ptr(made)  # C++ code would read from a null address
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if getattr(_recording, "now", False):
            raise CannotRecord(f"{func} is called below the recording")
        args, kwargs = tree_map_only(Sealed, lambda leaf: leaf._inside, (args, kwargs or {}))
        return func(*args, **kwargs)


# most ways to read values fail by themselves, because there is no memory; these would not
_READERS = ("__dlpack__", "__reduce_ex__", "__deepcopy__", "__format__", "__repr__", "__array__", "data_ptr")
for _name in (*_READERS, "untyped_storage", "storage", "numpy", "tolist", "item"):
    setattr(Sealed, _name, _way_out(_name))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every kernel below autograd, and keeps all tensors alive, so that no memory is used twice."""

    def __init__(self, given: set[Memory]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.own = given  # memory that may be written: the given tensors, and those made since

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the default imports torch's compiler, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise CannotRecord(f"{func} makes shapes or Python numbers out of values")
        if func is aten.mkldnn_rnn_layer.default:
            raise CannotRecord("torch's LSTM keeps what its gradient needs only while gradients are on")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotRecord(f"{func} draws from torch's generator")
        if func.overloadpacket in (aten.set_, aten.resize_, aten.resize_as_) or torch.Tag.inplace_view in func.tags:
            raise CannotRecord("the step gives a tensor another shape or other memory")
        known: dict[int, Sealed] = {}

        def opened(leaf: Tensor) -> Tensor:
            inside = leaf._inside if isinstance(leaf, Sealed) else leaf.detach()
            if isinstance(leaf, Sealed):
                known[id(inside)] = leaf
            return inside

        args, kwargs = tree_map_only(Tensor, opened, (args, kwargs or {}))
        result = func(*args, **kwargs)
        kernel = _kernel(func, args, kwargs, result)
        if not kernel.writes & kernel.reads <= self.own:
            raise CannotRecord("the step changes a tensor that is neither a parameter nor a buffer")
        self.own |= kernel.writes
        self.kernels.append(kernel)
        return tree_map_only(Tensor, lambda leaf: known[id(leaf)] if id(leaf) in known else Sealed(leaf), result)


def _kernel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Kernel:
    values = result if isinstance(result, (tuple, list)) else (result,)
    if any(value is not None and not isinstance(value, Tensor) for value in values):
        raise CannotRecord(f"{op} returns Python numbers")
    outputs = tuple(None if value is None else value.detach() for value in values)
    read = _memories((args, kwargs))
    written = (_memories(outputs) - read) | _memories(_changed(op, args, kwargs))
    if op.overloadpacket in _SHAPE_ONLY:
        read = frozenset()
    return Kernel(op, args, kwargs, outputs, read, written)


def _memory(tensor: Tensor) -> Memory:
    return int(tensor.untyped_storage()._cdata)


def _memories(values: Any) -> frozenset[Memory]:
    return frozenset(_memory(value) for value in tree_leaves(values) if isinstance(value, Tensor))


def _changed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator changes in place, according to its schema."""
    arguments = op._schema.arguments
    given = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
    written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [given[name] for name in written if name in given]


def _without_constants(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Leave out views, and constants: tensors that use nothing from outside and never change."""
    writers = Counter(place for kernel in kernels for place in kernel.writes)
    constant: set[Memory] = set()
    kept = []
    for kernel in kernels:
        if kernel.reads <= constant and not kernel.in_place and all(writers[place] == 1 for place in kernel.writes):
            constant |= kernel.writes
        elif kernel.writes:
            kept.append(kernel)
    return kept


def _needed(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Leave out kernels whose results neither a later kernel nor code outside reads."""
    inside = {place for kernel in kernels for place in kernel.writes - kernel.reads}
    wanted: set[Memory] = set()
    kept = []
    for kernel in reversed(kernels):
        if any(place in wanted or place not in inside for place in kernel.writes):
            kept.append(kernel)
            wanted |= kernel.reads
    return kept[::-1]


def _fused(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Add products directly to a tensor, if all they do is to be added to it in place."""
    readers = Counter(place for kernel in kernels for place in kernel.reads)
    writers = Counter(place for kernel in kernels for place in kernel.writes)
    makers = {place: kernel for kernel in kernels if kernel.op in (*_PRODUCTS, _ROWS) for place in kernel.writes}
    inside = {place for kernel in kernels if not kernel.in_place for place in kernel.writes}
    absorbed: set[Kernel] = set()

    def settled(place: Memory) -> bool:
        """Whether a tensor never changes after it is made, so that a kernel that reads it can run later."""
        return writers[place] == (1 if place in inside else 0)

    def added(target: Tensor, term: Tensor, factor: Any) -> Kernel | None:
        """Return a kernel that adds a term to its target without storing it."""
        maker = makers.get(_memory(term))
        if maker is None or readers[_memory(term)] > 1 or not all(map(settled, maker.reads)):
            return None
        found = _rows_to_add(maker, target, term) if maker.op is _ROWS else _product_to_add(maker, target, term)
        if found is None:
            return None
        absorbed.add(maker)
        method, *args = found
        place = frozenset({_memory(target)})
        return Kernel(method, tuple(args), {"alpha": factor}, (target,), maker.reads | place, place)

    rewritten: list[Kernel] = []
    for kernel in kernels:
        if kernel.op not in _IN_PLACE_SUMS or not isinstance(kernel.args[1], (Tensor, list)):
            rewritten.append(kernel)
            continue
        targets, terms = (part if isinstance(part, list) else [part] for part in kernel.args[:2])
        factor = kernel.kwargs.get("alpha", 1)
        rest: list[tuple[Tensor, Tensor]] = []
        for target, term in zip(targets, terms, strict=True):
            found = added(target, term, factor)
            rewritten.append(found) if found else rest.append((target, term))
        if rest:
            lists = tuple(map(list, zip(*rest, strict=True)))
            places = _memories(lists[0])
            rewritten.append(Kernel(aten._foreach_add_.List, lists, {"alpha": factor}, (), _memories(lists), places))
    return [kernel for kernel in rewritten if kernel not in absorbed]


def _product_to_add(product: Kernel, target: Tensor, term: Tensor) -> tuple[Any, ...] | None:
    """Return a call that adds a matrix product directly to its target, which may be transposed."""
    views = [(target, term)] + [(target.mT, term.mT)] * (term.dim() >= 2)
    view = next((view for view, other in views if _same(other, product.outputs[0])), None)
    return None if view is None else (_PRODUCTS[product.op], view, *product.args)


def _rows_to_add(gather: Kernel, target: Tensor, term: Tensor) -> tuple[Any, ...] | None:
    """Return a call that adds the gradient of an embedding only to the rows that were looked up."""
    gradient, rows, _, padding, by_frequency = gather.args
    plain = _same(term, gather.outputs[0]) and padding < 0 and not by_frequency
    if not plain or not gradient.is_contiguous() or not rows.is_contiguous():  # a copy made now would be out of date
        return None
    return Tensor.index_add_, target, 0, rows.view(-1), gradient.view(-1, gradient.shape[-1])


def _same(one: Tensor, other: Tensor | None) -> bool:
    assert other is not None
    return one.shape == other.shape and one.stride() == other.stride() and one.data_ptr() == other.data_ptr()


def _call(kernel: Kernel) -> Call:
    """Return a call that writes to the same memory as the recorded kernel did."""
    if kernel.op is aten.max_pool2d_with_indices.default and (pooled := _pool_by_channel(kernel)) is not None:
        return pooled
    if kernel.in_place:
        return partial(_direct(kernel.op), *kernel.args, **kernel.kwargs)
    return _into_outputs(kernel) or partial(_copied, kernel)


def _direct(op: Any) -> Callable[..., Any]:
    """Return torch's Python function for an in-place operator: calling it is faster than calling the operator."""
    if op is aten._foreach_add_.List:
        return torch._foreach_add_
    if op in (aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default):
        return getattr(Tensor, op.overloadpacket.__name__)  # type: ignore[no-any-return]
    return op._op if hasattr(op, "_op") else op  # type: ignore[no-any-return]


def _into_outputs(kernel: Kernel) -> Call | None:
    """Return the variant of an operator that writes to all its given output tensors, if there is one."""
    if any(output is None for output in kernel.outputs) or kernel.op.overloadpacket in _RESIZES:
        return None
    expected = {argument.name: str(argument.type) for argument in kernel.op._schema.arguments}
    packet = kernel.op.overloadpacket
    for name in packet.overloads():
        op = getattr(packet, name)
        targets = [argument.name for argument in op._schema.arguments if argument.is_out]
        others = {argument.name: str(argument.type) for argument in op._schema.arguments if not argument.is_out}
        left_out = expected.keys() - others.keys()
        if len(targets) != len(kernel.outputs) or not others.items() <= expected.items() or left_out - _NOT_FOR_OUT:
            continue
        kwargs = {name: value for name, value in kernel.kwargs.items() if name in others}
        into = dict(zip(targets, kernel.outputs, strict=True))
        call = partial(op._op, *kernel.args, **kwargs, **into)
        quick = getattr(torch, packet.__name__, None)
        if quick is not None and list(into) == ["out"]:
            quick = partial(quick, *kernel.args, **kwargs, **into)
            with suppress(TypeError, RuntimeError):  # not every function takes `out`
                quick()
                return quick
        return call
    return None


def _copied(kernel: Kernel) -> None:
    result = kernel.op(*kernel.args, **kernel.kwargs)
    for target, value in zip(kernel.outputs, result if isinstance(result, (tuple, list)) else (result,), strict=True):
        if target is not None:
            target.copy_(value)


def _pool_by_channel(kernel: Kernel) -> Call | None:
    """Max-pool with the channels last: torch has a vectorised kernel for this layout, which is ten times as fast."""
    image, (values, places) = kernel.args[0], kernel.outputs
    if image.dim() != 4 or image.device.type != "cpu" or not image.is_contiguous():
        return None
    assert values is not None
    assert places is not None
    last = [t.contiguous(memory_format=torch.channels_last) for t in (image, values, places)]
    if not all(t.is_contiguous(memory_format=torch.channels_last) for t in last):
        return None
    pool = partial(
        aten.max_pool2d_with_indices.out, last[0], *kernel.args[1:], **kernel.kwargs, out=last[1], indices=last[2]
    )

    def call() -> None:
        last[0].copy_(image)
        pool()
        values.copy_(last[1])
        places.copy_(last[2])

    return call
