"""Fitted objects in files.

Arrays, and the structure around them as text. No pickle: loading runs nothing out of a file.
"""

import dataclasses
import functools as ft
import importlib.metadata
import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial, PyTreeDef

from .._checks import is_concrete

_FORMAT, _VERSION, _STRUCTURE = "kbr_jax tree", 1, "structure.json"
_ROOT = __name__.partition(".")[0]
# Packages and modules that they may come from, if the caller does not give them.
_FUNCTIONS, _CLASSES = (_ROOT, "jax.nn", "jax.numpy"), (_ROOT, "optax", "equinox.nn")


def save(
    path: str | os.PathLike, tree: Any, *, functions: Mapping[str, Callable] | None = None
) -> None:
    """Save a fitted object, or a tree of them, to one file for `load`.

    `load` needs not be told what is in it.

    The file is a zip of the arrays, as NumPy's `.npy`, and of the structure as JSON. An array that
    occurs twice in the tree is stored once. The file takes its name, from an older one if need be,
    only when it is complete.

    **Arguments:**

    - `path`: where to; it gets no suffix.
    - `tree`: kernels, features, embeddings, moments, models, filters and their states, states of
      optax; tuples, named tuples, lists and dicts of these; arrays of jax or NumPy, random keys,
      plain numbers, strings, None; networks of `equinox.nn` (an MLP needs a `final_activation` that
      has a name, such as `jax.nn.identity`); functions of kbr_jax, `jax.nn` and `jax.numpy`.
    - `functions`: names for other functions and classes: a ufunc, a callable that serves
      as kernel, `decode` of a `CusumRestartFilter`, the class of a kernel of your own. Only the
      name is stored; `load` asks for the thing itself.

    Not stored: weak types, and how an array is spread over devices. Cost: time and size O(bytes of
    the distinct arrays).

    **Raises:** `ValueError` for traced values (save outside `jit`), for other functions and classes
    that are not in `functions`, and for anything else that cannot be stored (the mesh
    of a `ConjugateGradient`), saying where in the tree it is.
    """
    target, encoder = pathlib.Path(os.path.realpath(path)), _Encoder(functions or {})
    node = encoder.encode(tree, "tree")
    library = next(
        (found.version for found in importlib.metadata.distributions(name=_ROOT)), "unknown"
    )
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "library": library,
        "functions": sorted(encoder.used),
    }
    text = json.dumps(
        {**header, "arrays": [entry for _, _, entry in encoder.stored.values()], "tree": node}
    )
    temporary = target.with_name(f"{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:
            _write(file, text, [array for _, array, _ in encoder.stored.values()])
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike, *, functions: Mapping[str, Callable] | None = None) -> Any:
    r"""Load what `save` wrote. Objects are put together from their fields; no constructor and no
    code of the file runs.

    **Arguments:** `path`; `functions`, the functions and classes that the tree was saved with,
    under the same names.

    **Returns:** a tree of the same structure with bitwise equal leaves, on the default device. An
    array that occurred twice in the tree is one array again. Cost: time and memory O(size of the
    file).

    **Raises:** `ValueError` for a file that `save` did not write, that is damaged, or that a newer
    version wrote; for classes or fields that this version does not have; for missing `functions`;
    and for 64-bit arrays while jax is limited to 32 bits.
    """
    given, name = dict(functions or {}), os.fspath(path)
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                header = json.loads(archive.read(_STRUCTURE))
                _check_header(header, given)
                arrays = [
                    _read_array(archive, index, entry)
                    for index, entry in enumerate(header["arrays"])
                ]
            return _Decoder(arrays, given, header["library"]).decode(header["tree"])
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # the machine's, not the file's
        except ValueError as error:
            raise ValueError(f"`{name}` cannot be loaded: {error}") from error
        except Exception as error:  # bytes can be wrong in many ways
            raise ValueError(
                f"`{name}` is damaged, or `save` did not write it: {error!r}."
            ) from error


class _Encoder:
    """Trees as JSON.

    Gathers each array once, by its id: number, array, and what the structure records of it.
    """

    def __init__(self, given: Mapping[str, Callable]):
        self.names = {id(thing): name for name, thing in given.items()}
        self.used: set[str] = set()
        self.stored: dict[int, tuple[int, Any, dict[str, Any]]] = {}

    def encode(self, value: Any, where: str) -> Any:
        """The JSON of one value; `where` is the expression by which the caller reaches it."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.dtype):
            return self._dtype(value, where)
        if isinstance(value, (jax.Array, np.generic)) or type(value) is np.ndarray:
            return self._array(value, where)
        if address := self._address(value, _FUNCTIONS):
            return {"function": address}
        kinds: dict[Any, Callable[[], Any]] = {
            list: lambda: [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)],
            tuple: lambda: {"tuple": self.encode(list(value), where)},
            dict: lambda: {
                "dict": [
                    [self.encode(k, where), self.encode(value[k], f"{where}[{k!r}]")] for k in value
                ]
            },
            Partial: lambda: {
                "partial": self.encode([value.func, value.args, value.keywords], where)
            },
            PyTreeDef: lambda: {
                "structure": self.encode(value.unflatten([0] * value.num_leaves), where)
            },
        }
        return kinds.get(type(value), lambda: self._object(value, where))()

    def _dtype(self, value: np.dtype, where: str) -> dict[str, Any]:
        if value.kind in "SUO":
            raise ValueError(
                f"`{where}` is a dtype of words, {value}; only those of numbers can be stored."
            )
        return {"dtype": value.name}

    def _array(self, value: Any, where: str) -> dict[str, Any]:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return {
                "key": [
                    str(jax.random.key_impl(value)),
                    self._array(jax.random.key_data(value), where),
                ]
            }
        if not is_concrete(value):
            raise ValueError(
                f"`{where}` is traced by jax and has no value yet; save outside `jit`, `grad` and "
                f"`vmap`."
            )
        if not value.dtype.isnative or not (
            value.dtype.kind in "biufc" or value.dtype.isbuiltin == 2
        ):
            raise ValueError(
                f"`{where}` is an array of {value.dtype}; only plain numbers can be stored: "
                f"convert it."
            )
        kind = (
            "jax"
            if isinstance(value, jax.Array)
            else "scalar"
            if isinstance(value, np.generic)
            else "numpy"
        )
        entry = {"kind": kind, "dtype": value.dtype.name, "shape": list(value.shape)}
        return {"array": self.stored.setdefault(id(value), (len(self.stored), value, entry))[0]}

    def _object(self, value: Any, where: str) -> dict[str, Any]:
        kind, names = type(value), _field_names(type(value))
        if names is None or not (address := self._address(kind, _CLASSES)):
            name = getattr(
                value, "__qualname__", f"an object of {kind.__module__}.{kind.__qualname__}"
            )
            raise ValueError(
                f"`{where}` is {name}, which {_ROOT} could not find again. Store functions and "
                f"classes of your own by "
                'name, `save(path, tree, functions={"name": it})` and '
                '`load(path, functions={"name": it})`; or take it out. For the `<lambda>` that '
                "`equinox.nn.MLP` has at its end give `final_activation=jax.nn.identity`."
            )
        fields = {name: self.encode(getattr(value, name), f"{where}.{name}") for name in names}
        return {"object" if _accepted(value) else "batch": [address, fields]}

    def _address(self, thing: Any, homes: tuple[str, ...]) -> str | None:
        """`module:name` of a function or class, else None.

        `:name` if the caller named it.
        """
        if id(thing) in self.names:
            self.used.add(self.names[id(thing)])
            return f":{self.names[id(thing)]}"
        name, module = getattr(thing, "__qualname__", None), str(getattr(thing, "__module__", None))
        # The public name comes first: it outlives the private module.
        places = (module.partition(".")[0], module, *homes)
        addresses = (f"{place}:{name}" for place in places)
        return next(
            (address for address in addresses if name and _find(address, homes) is thing), None
        )


class _Decoder:
    """The inverse of an encoder, for loaded arrays and things given by the caller."""

    def __init__(self, arrays: list[Any], given: dict[str, Any], library: str):
        self.arrays, self.given, self.library = arrays, given, library
        self.checked = True

    def decode(self, node: Any) -> Any:
        """The value of a node of the structure."""
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((kind, content),) = node.items()
        kinds: dict[str, Callable[[], Any]] = {
            "dtype": lambda: jnp.dtype(content),
            "array": lambda: self.arrays[content],
            "key": lambda: jax.random.wrap_key_data(self.decode(content[1]), impl=content[0]),
            "function": lambda: self._find(content, _FUNCTIONS),
            "tuple": lambda: tuple(self.decode(content)),
            "dict": lambda: dict(self.decode(content)),
            "partial": lambda: Partial(
                self.decode(content[0]), *self.decode(content[1]), **self.decode(content[2])
            ),
            "structure": lambda: jax.tree.structure(self._unchecked(content)),
            "object": lambda: self._object(*content),
            "batch": lambda: self._unchecked({"object": content}),
        }
        return kinds[kind]()

    def _object(self, address: str, nodes: dict[str, Any]) -> Any:
        kind = self._find(address, _CLASSES)
        names, fields = (
            _field_names(kind),
            {name: self.decode(node) for name, node in nodes.items()},
        )
        if names is None or set(names) != set(fields):
            raise ValueError(
                f"{address} has the fields {sorted(names or ())} here and {sorted(fields)} in the "
                f"file, which {_ROOT} "
                f"{self.library} wrote: load it with that version, or fit and save anew."
            )
        if issubclass(kind, tuple):
            return tuple.__new__(kind, [fields[name] for name in names])
        made = object.__new__(kind)
        for field in dataclasses.fields(kind):
            # A module is frozen. Its values were converted before saving: again, as a check alone.
            convert = field.metadata.get("converter") if self.checked else None
            if convert is not None:
                convert(fields[field.name])
            object.__setattr__(made, field.name, fields[field.name])
        for one in reversed(kind.__mro__) if self.checked else ():
            check = vars(one).get("__check_init__")
            if check is not None:
                check(made)
        return made

    def _unchecked(self, node: Any) -> Any:
        """A value whose numbers stand for nothing."""
        plain = _Decoder(self.arrays, self.given, self.library)
        plain.checked = False
        return plain.decode(node)

    def _find(self, address: str, homes: tuple[str, ...]) -> Any:
        found = self.given.get(address[1:]) if address.startswith(":") else _find(address, homes)
        if not callable(found):
            raise ValueError(
                f"{address} is unknown here; load it with the version that wrote it, "
                f"{self.library}."
            )
        return found


def _accepted(value: Any) -> bool:
    """Whether a class takes the numbers that an object of it holds.

    It does not take those of a batch of `vmap`, of a gradient, or of an optimizer's moments.
    """
    kind = type(value)
    try:
        for field in () if issubclass(kind, tuple) else dataclasses.fields(kind):
            if (convert := field.metadata.get("converter")) is not None:
                convert(getattr(value, field.name))
        for one in kind.__mro__:
            if (check := vars(one).get("__check_init__")) is not None:
                check(value)
    except (ValueError, TypeError):
        return False
    return True


def _find(address: str, homes: tuple[str, ...]) -> Any:
    """What is defined as `module:name` in one of the packages or modules `homes`, else None.

    Not what a module there imports.
    """
    module, _, name = address.partition(":")
    if not any(f"{module}.".startswith(f"{home}.") for home in homes):
        return None
    try:
        found = ft.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None
    defined = getattr(found, "__qualname__", None) == name and str(found.__module__).partition(".")[
        0
    ] in {home.partition(".")[0] for home in homes}
    return found if defined else None


def _field_names(kind: Any) -> tuple[str, ...] | None:
    """The fields of a module or named tuple; None for other classes."""
    if isinstance(kind, type) and issubclass(kind, eqx.Module):
        return tuple(field.name for field in dataclasses.fields(kind))
    return (
        getattr(kind, "_fields", None)
        if isinstance(kind, type) and issubclass(kind, tuple)
        else None
    )


def _write(file: Any, structure: str, arrays: list[Any]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        with archive.open(
            _STRUCTURE, "w"
        ) as entry:  # unlike `writestr`, puts no date: equal trees, equal files
            entry.write(structure.encode())
        for index, array in enumerate(map(np.asarray, arrays)):
            with archive.open(f"{index}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(
                    entry, array.view(_plain(array.dtype)), allow_pickle=False
                )


def _plain(dtype: np.dtype) -> np.dtype:
    """What numbers of this type are stored as: the format does not know bfloat16 and its like."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.isbuiltin == 2 else dtype


def _read_array(archive: zipfile.ZipFile, index: int, entry: dict[str, Any]) -> Any:
    """One array as it was, checked against its entry in the structure."""
    with archive.open(f"{index}.npy") as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    dtype = np.dtype(entry["dtype"])
    if array.dtype != _plain(dtype) or list(array.shape) != entry["shape"]:
        raise ValueError(
            f"it is damaged: array {index} is {array.dtype}{list(array.shape)}, recorded are "
            f"{entry}."
        )
    kinds = {"jax": jnp.asarray, "numpy": np.asarray, "scalar": lambda plain: plain[()]}
    return kinds[entry["kind"]](array.view(dtype))


def _check_header(header: Any, given: dict[str, Any]) -> None:
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError("`save` did not write it.")
    if header["version"] > _VERSION:
        raise ValueError(f"a newer {_ROOT}, version {header['library']}, wrote it; update {_ROOT}.")
    if missing := [name for name in header["functions"] if name not in given]:
        raise ValueError(
            f"it needs functions of yours, {missing}: `load(path, "
            f"functions={{{missing[0]!r}: ...}})`."
        )
    for dtype in (np.dtype(entry["dtype"]) for entry in header["arrays"] if entry["kind"] == "jax"):
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                f"it holds {dtype} arrays, and jax is limited to 32 bits: set `jax_enable_x64` "
                f"first."
            )
