"""Apply a trained model to new examples: preprocessing before the model, class names and probabilities after it."""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.data.csv_text import CsvText, check_points, composed, has_decimal_comma, not_csv
from fedloom.data.plausibility import unusual
from fedloom.data.preprocessing import Preprocessing
from fedloom.data.sources.archive import NOT_TEXT, open_text
from fedloom.data.unit_of_rows import other_unit
from fedloom.errors import InputError
from fedloom.results.safe_text import for_spreadsheet
from fedloom.score_metrics import is_binary

Answers = dict[str, list[Any]]  # column → a value for each example
BATCH = 1000  # examples in one pass
MOST_CLASSES = 50  # with more, only the probability of the predicted class is given
NO_CLASS = "probability of no class"  # what a model gives to outputs that belong to none
MOST_REASONS = 5  # reasons why rows have no prediction that are told
SKIP = "No row is predicted: --skip-bad-rows leaves the predictions of such rows empty."
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")  # a whole number as Python writes it, of 64 bits


class Predictor(nn.Module):
    """A trained model with its preprocessing: features as they are measured in, probabilities or numbers out.

    It is what `fedloom export --onnx` and `--torch-export` write, so it has no Python in its forward pass but torch's.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing,
        dtype: torch.dtype,
        client: str | None = None,
        has_logits: bool = False,
    ) -> None:
        super().__init__()
        self.threshold: float | None = None  # the probability from which the second of two classes is predicted
        self.has_logits = has_logits  # of labels that are 0 or 1, but no classes: there may be several of them
        self.model, self.preprocessing, self.dtype = model.eval(), preprocessing, dtype
        statistics = preprocessing.statistics(client)
        self.normalizes = statistics is not None
        mean, std = statistics or (torch.zeros(()), torch.ones(()))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def with_threshold(self, threshold: float | None) -> Predictor:
        """Predict the second of two classes from another probability than 0.5 on; None changes nothing."""
        if threshold is not None:
            classes = self.preprocessing.classes
            if len(classes) != 2:
                has = f"{len(classes)} classes" if classes else "numbers to predict"
                raise InputError(f"A threshold is for two classes, and this model has {has}. Leave it out.")
            if not 0 < threshold < 1:
                raise InputError(f"The threshold is a probability between 0 and 1. Got {threshold:g} instead.")
        self.threshold = threshold
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the probability of each class, or the predicted numbers in the labels' own units.

        What a model gives to outputs that belong to no class is left out: then the sum is less than 1.
        """
        found, classes = self.answers(self.model(self.prepared(x))), len(self.preprocessing.classes)
        return found[..., :classes] if 0 < classes < found.shape[-1] else found

    def prepared(self, x: Tensor) -> Tensor:
        """Return features as the model was trained on them."""
        scale = 1.0 if x.is_floating_point() else self.preprocessing.scale
        if self.normalizes:  # as `data/normalize.py` does it: in double precision, missing values become the mean
            x = ((x.double() * scale - self.mean) / self.std).float()
            return torch.nan_to_num(x, nan=0.0).to(self.dtype)
        if x.is_floating_point():
            return x.to(self.dtype)
        return x.to(self.dtype) * scale if scale != 1.0 or x.dtype == torch.uint8 else x

    def answers(self, output: Tensor) -> Tensor:
        """Return probabilities of classes, or numbers in the labels' own units."""
        if not isinstance(output, Tensor):
            raise InputError(
                f"The model returns a {type(output).__name__}, and fedloom does not know which part of it is the "
                "prediction: that needs a model that returns one tensor."
            )
        if self.preprocessing.classes:
            if is_binary(output):
                positive = torch.sigmoid(output.reshape(-1, 1))
                return torch.cat([1 - positive, positive], dim=1)
            return torch.softmax(output, dim=-1)
        if self.has_logits:
            return torch.sigmoid(output)
        mean, std = self.preprocessing.target or (0.0, 1.0)
        return output if self.preprocessing.target is None else output * std + mean

    @torch.no_grad()
    def answer(self, x: Tensor) -> Answers:
        """Return a prediction for each example; for classes, the class's name and probabilities.

        Names that are all whole numbers are given as numbers.
        """
        parts = [self.answers(self.model(self.prepared(part))) for part in torch.split(x, BATCH)]
        found = torch.cat(parts).double().numpy()
        classes = np.array(self.preprocessing.classes)
        if not len(classes):
            names = self.preprocessing.label if len(self.preprocessing.label) > 1 else ("",)
            columns = found.reshape(len(found), -1)
            if columns.shape[1] != len(names):
                names = ("",) if columns.shape[1] == 1 else tuple(str(place) for place in range(columns.shape[1]))
            shown = {"prediction": columns}
            if self.has_logits:
                shown = {"prediction": (columns > 0.5).astype(int), "probability": columns}
            return {
                f"{what} {name}".strip(): column.tolist()
                for what, numbers in shown.items()
                for name, column in zip(names, numbers.T, strict=True)
            }
        best = found[:, : len(classes)].argmax(1)
        if self.threshold is not None:
            best = (found[:, 1] >= self.threshold).astype(np.int64)
        named = classes.tolist()
        if all(WHOLE.fullmatch(name) for name in named):  # as in the caller's own labels: 1 == "1" is never true
            named = [int(name) for name in named]
        answers: Answers = {"prediction": [named[place] for place in best]}
        if len(classes) > MOST_CLASSES:
            return {**answers, "probability": found[np.arange(len(best)), best].tolist()}
        answers |= {f"probability {name}": found[:, place].tolist() for place, name in enumerate(classes)}
        others = found[:, len(classes) :]
        return {**answers, NO_CLASS: others.sum(1).tolist()} if others.shape[1] else answers

    def cautions(self, x: Tensor, rows: str = "rows") -> list[str]:
        """Return a sentence for each column that is empty, or has numbers outside of the training data.

        `rows` says what these examples are, if some were left out.
        """
        columns, reach = self.preprocessing.columns, self.preprocessing.reach
        numeric = [not column.categories for column in columns for _ in column.features]
        if not self.normalizes or not columns or not len(x):
            return []
        parts = torch.split(x, [len(column.features) for column in columns], dim=1)
        empty = [column.name for column, part in zip(columns, parts, strict=True) if part.isnan().all()]
        instead = self.preprocessing.stands_for_missing
        said = [f"{name} is empty in all {rows}: the model takes {instead(name)}." for name in empty]
        blank = int(x.isnan().all(dim=1).sum())
        if blank and len(empty) < len(columns):
            whose = "of means" if self.preprocessing.has_training_means else "of made-up values"
            said.append(
                f"{blank:,} of {len(x):,} {rows} are empty: their predictions are those {whose}, not of anybody."
            )
        if self.preprocessing.bounds:  # nothing is known of the training data
            return said + self._beyond_bounds(x, rows)
        limits = None if reach is None else np.array(reach)
        for place in np.flatnonzero(numeric).tolist():  # one at a time: a file may have many rows
            here = slice(place, place + 1)
            values, mean, std = (part[..., here].double().numpy() for part in (x, self.mean, self.std))
            name = self.preprocessing.features[place]
            said += other_unit(name, values[:, 0], float(mean[0]), float(std[0]), rows)
            said += unusual([name], values, mean, std, None if limits is None else limits[:, here], rows)
        return said

    def _beyond_bounds(self, x: Tensor, rows: str) -> list[str]:
        """Return a sentence for each feature with values beyond the bounds by which it is scaled."""
        said = []
        for name, (low, high) in self.preprocessing.bounds.items():
            values = x[:, self.preprocessing.features.index(name)]
            beyond = int(((values < low) | (values > high)).sum())
            if beyond:
                said.append(f"{name} is beyond its bounds, {low:g} to {high:g}, in {beyond:,} of {len(x):,} {rows}.")
        return said


def predict(predictor: Predictor, rows: Any) -> Any:
    """Return predictions for a data frame (as a data frame with the same index), or for an array of examples."""
    wanted = predictor.preprocessing.shape
    if not hasattr(rows, "columns"):
        try:
            array = np.array(rows.detach().cpu().numpy() if isinstance(rows, Tensor) else rows, order="C")
            x = torch.tensor(array.astype(np.float64) if array.dtype == object else array)
        except (TypeError, ValueError):  # such as a path, a dict, or texts
            x = torch.empty(0)
        x = x.float() if x.dtype in (torch.float64, torch.float16) else x
        if tuple(x.shape[1:]) != wanted or not x.dim():
            got = tuple(x.shape) if x.numel() else type(rows).__name__
            raise InputError(
                f"Examples must be an array of shape {('n', *wanted)}, or a data frame with named columns, such as "
                f"pandas.read_csv(file). Got {got}."
            )
        _check_some(x)
        x = predictor.preprocessing.marked(x)
        if x.is_floating_point() and x.isnan().any() and not predictor.preprocessing.missing:
            raise InputError("Some examples have missing values (nan), and this model was trained without any.")
        _warn(predictor, x)
        return predictor.answer(x)
    import pandas

    if not isinstance(rows, pandas.DataFrame):
        kind = f"{type(rows).__module__.partition('.')[0]}.{type(rows).__name__}"
        raise InputError(f"Data frames must be those of pandas. Got {kind}: convert it, such as by to_pandas().")
    twice = [name for name, count in Counter(composed(str(name)) for name in rows.columns).items() if count > 1]
    if twice:
        raise InputError(f"The frame has two columns '{twice[0]}': every column needs its own name.")
    _check_some(rows)
    known = {column.name: column.categories for column in predictor.preprocessing.columns}
    names = {name: composed(str(name)) for name in rows.columns}
    cells = {shown: _cells(rows[name], known.get(shown, ())) for name, shown in names.items()}
    for caution in predictor.preprocessing.lacked(predictor.preprocessing.check_columns(cells)):
        logging.getLogger("fedloom").warning(caution)
    x = predictor.preprocessing.encode(cells, lambda at: f"Row {rows.index[at]!r} of the frame")
    _warn(predictor, x)
    return pandas.DataFrame(predictor.answer(x), index=rows.index)


def _check_some(rows: Any) -> None:
    if not len(rows):
        raise InputError("There are no examples to predict: the data frame or array has no rows. Give at least one.")


def _warn(predictor: Predictor, x: Tensor) -> None:
    for caution in (*predictor.preprocessing.units, *predictor.cautions(x)):
        logging.getLogger("fedloom").warning(caution)


def _cells(column: Any, categories: Sequence[str]) -> list[str]:
    """Return the cells as the training file had them: pandas makes True of true and TRUE."""

    def text(value: Any) -> str:
        same = [name for name in categories if name.lower() == str(value).lower()] if isinstance(value, bool) else []
        return same[0] if len(same) == 1 else composed(str(value))

    missing = column.isna().tolist()
    return ["" if absent else text(value) for value, absent in zip(column.tolist(), missing, strict=True)]


def predict_file(
    predictor: Predictor,
    path: Path,
    tell: Callable[[str], object] = lambda text: None,
    encoding: str | None = None,
    skip_bad_rows: bool = False,
) -> Iterator[list[Any]]:
    """Yield a header and a row for every line of a CSV file: its columns that are not features, and the prediction.

    `tell` is called with cautions about all rows, after the last one. A row that the model cannot take, such as for an
    unknown category, raises an error. With `skip_bad_rows`, its prediction is empty, and `tell` counts such rows and
    says why.
    """
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    try:
        with open_text(path, path.name, encoding) as text:
            table, preprocessing = CsvText.open(text, str(path)), predictor.preprocessing
            lacking = preprocessing.check_columns(table.header)
            features = {column.name for column in preprocessing.columns}
            kept = [name for name in table.header if name not in features]
            header: list[str] = []
            answers: Answers = {}
            seen: list[Tensor] = []
            bad: list[InputError] = []
            misshapen: dict[int, InputError] = {}
            read = 0
            for lines, cells in table.blocks(misshapen):
                cells |= {name: ("",) * len(lines) for name in lacking}
                if table.comma_is_decimal:
                    check_points(cells, _numeric(preprocessing), _where(lines, table.shown))
                x, errors = _encoded(preprocessing, table, cells, lines, misshapen)
                if errors and not skip_bad_rows:
                    raise InputError(f"{errors[min(errors)]} {SKIP}")
                bad += [errors[at] for at in sorted(errors)]
                good = [at for at in range(len(lines)) if at not in errors]
                read += len(lines)
                if not len(good) and not header:
                    raise InputError(f"The model can take none of the first {read:,} rows. The first: {bad[0]}")
                seen += [x] if predictor.normalizes and len(good) else []  # for cautions about all rows
                answers = predictor.answer(x) if len(good) else {name: [] for name in answers}
                if not header:
                    header = [*(f"{name} (given)" if name in answers else name for name in kept), *answers]
                    yield header
                columns = [
                    *([for_spreadsheet(cell) for cell in cells[name]] for name in kept),
                    *(_spread(_short(values), good, len(lines)) for values in answers.values()),
                ]
                yield from (list(row) for row in zip(*columns, strict=True))
            if not header:
                raise InputError(f"The file {path} has no examples: add at least one line after the header.")
            rows = "rows that are predicted" if bad else "rows"
            about = predictor.cautions(torch.cat(seen), rows) if seen else ()
            for caution in (*preprocessing.units, *preprocessing.lacked(lacking), *about):
                tell(caution)
            if bad:
                tell(f"{len(bad):,} of {read:,} rows have no prediction:{_reasons(bad)}")
            if NO_CLASS in header:
                tell(f"The model has more outputs than classes. What it gives to the others is in '{NO_CLASS}'.")
    except (*NOT_TEXT, csv.Error) as error:
        raise not_csv(str(path), error, ", or name its encoding, such as --encoding latin-1") from None


def _encoded(
    preprocessing: Preprocessing,
    table: CsvText,
    cells: Mapping[str, Sequence[str]],
    lines: Sequence[int],
    misshapen: Mapping[int, InputError],
) -> tuple[Tensor, dict[int, InputError]]:
    """Return the features of rows that the model can take, and by their places why it cannot take the others."""
    encode = partial(preprocessing.encode, comma_is_decimal=table.comma_is_decimal)
    errors = {at: misshapen[line] for at, line in enumerate(lines) if line in misshapen}
    if not errors:
        with suppress(InputError):  # of the first column with a wrong cell, which may not be in the first bad row
            return encode(cells, _where(lines, table.shown)), {}
    beside, parts = _decimal_commas(preprocessing, table, cells), []
    for at in (at for at in range(len(lines)) if at not in errors):
        row = {name: [column[at], beside.get(name, column[at])] for name, column in cells.items()}
        try:
            parts.append(encode(row, _where([lines[at]] * 2, table.shown))[:1])
        except InputError as error:
            errors[at] = error
    return torch.cat(parts) if parts else torch.empty(0), errors


def _numeric(preprocessing: Preprocessing) -> list[str]:
    return [column.name for column in preprocessing.columns if not column.categories]


def _decimal_commas(preprocessing: Preprocessing, table: CsvText, cells: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return a number with a decimal comma of each column that has one: beside it, a point is a mistake."""
    if not table.comma_is_decimal:
        return {}
    known = _numeric(preprocessing)
    found = {name: next((cell for cell in cells[name] if has_decimal_comma(cell.strip())), None) for name in known}
    return {name: cell for name, cell in found.items() if cell is not None}


def _reasons(bad: Sequence[InputError]) -> str:
    """Return the first errors, one on each line, and how many more there are."""
    more = [f"and {len(bad) - MOST_REASONS:,} more"] if len(bad) > MOST_REASONS else []
    return "".join(f"\n  {reason}" for reason in [*bad[:MOST_REASONS], *more])


def _spread(values: list[Any], places: Sequence[int], rows: int) -> list[Any]:
    """Return a cell for each row: the values at their places, and nothing elsewhere."""
    known = dict(zip(places, values, strict=True))
    return [known.get(row, "") for row in range(rows)]


def _short(values: list[Any]) -> list[Any]:
    """Return numbers with six digits, which say all that a model knows."""
    return [f"{value:.6g}" if isinstance(value, float) else value for value in values]


def _where(lines: Sequence[int], shown: str) -> Callable[[int], str]:
    return lambda at: f"Line {lines[at]} of {shown}"
