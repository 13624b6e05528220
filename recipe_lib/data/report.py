"""What became of the rows of a dataset, in numbers and in lines for the log."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DataReport:
    """Counts of one pass over a dataset. Tokens are targets: what a row's tokens are to predict."""

    source: str
    format: str
    max_seq_len: int
    template: str = "none"
    train_on: str = "answer"
    adds_bos: bool = False
    rows_read: int = 0
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    bad_rows: Counter[str] = field(default_factory=Counter)
    first_bad: dict[str, str] = field(default_factory=dict)  # cause -> the first such row's place and detail
    truncated_rows: int = 0
    skipped_long_rows: int = 0
    emptied_rows: int = 0  # truncated rows whose whole answer was cut off; they are left out
    long_answer_tokens: int = 0  # trained tokens of rows over the limit, before anything was cut
    lost_answer_tokens: int = 0
    texts: int = 0  # documents, which are cut into rows
    dropped_pieces: int = 0  # last pieces of documents that do not fill a row
    dropped_tokens: int = 0
    apart_rows: int = 0

    @property
    def trained_share(self) -> float:
        """Share of the tokens that the loss counts, 0 to 1."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def lines(self) -> list[str]:
        """The report as log lines."""
        everything = self.train_on == "all" or self.texts > 0
        what = "all tokens" if everything else "answers with their end-of-turn token"
        read = f"cut from {self.texts} texts" if self.texts else f"of {self.rows_read}"
        lines = [
            f"data: {self.rows} rows {read} read from {self.source} (format {self.format}, template "
            f"{self.template}), {self.tokens} tokens; the loss counts {what}: {_percent(self.trained_share)} of them",
            f"data: {self._bos_line()}",
        ]
        long = self.truncated_rows + self.skipped_long_rows
        if long:
            share = self.lost_answer_tokens / max(1, self.long_answer_tokens)
            done = "truncated" if self.truncated_rows else "left out"
            empty = f", {self.emptied_rows} of them left out because no answer was left" if self.emptied_rows else ""
            lines.append(
                f"data: {long} of {self.rows_read} rows ({_percent(long / self.rows_read)}) exceed {self.max_seq_len} "
                f"tokens and were {done}{empty}; {_percent(share)} of their answer tokens lost"
            )
        if self.dropped_pieces:
            lines.append(
                f"data: {self.dropped_pieces} last pieces of texts ({self.dropped_tokens} tokens) do not fill a row of "
                f"{self.max_seq_len} tokens and were left out"
            )
        if self.apart_rows:
            lines.append(
                f"data: in {self.apart_rows} rows an answer's first letters would join the prompt's last token; "
                "the answer is encoded on its own there, as it is generated"
            )
        bad = sum(self.bad_rows.values())
        if bad:
            causes = ", ".join(f"{cause} {count}" for cause, count in self.bad_rows.most_common())
            lines.append(f"data: {bad} of {self.rows_read} rows are bad and were left out: {causes}")
            lines += [f"data: first with {cause}: {place}" for cause, place in self.first_bad.items()]
        return lines

    def _bos_line(self) -> str:
        if self.template == "chat":
            return "the chat template alone says whether a row begins with BOS"
        what = "text" if self.texts else "row"
        return f"each {what} begins with BOS" if self.adds_bos else f"no BOS is put before a {what}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
