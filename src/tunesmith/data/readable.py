"""What the tokenizer makes of the texts: unknown tokens, scripts that it takes to pieces, rows that are cut, languages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunesmith.data.text_survey import Ints
from tunesmith.findings import Finding, Severity

MOST_ROWS = 3_000
UNKNOWN_SHARE = 0.01
CUT_SHARE = 0.1
SCRIPT_SHARE = 0.02
PIECES_A_LETTER = 0.85
"""Tokens a letter from which a tokenizer spells a script instead of reading it."""
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "Latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF)),
    "Greek": ((0x370, 0x3FF),),
    "Cyrillic": ((0x400, 0x52F),),
    "Hebrew": ((0x590, 0x5FF),),
    "Arabic": ((0x600, 0x6FF), (0x750, 0x77F)),
    "Devanagari": ((0x900, 0x97F),),
    "Thai": ((0xE00, 0xE7F),),
    "Hangul": ((0x1100, 0x11FF), (0xAC00, 0xD7AF)),
    "Kana": ((0x3040, 0x30FF),),
    "Han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF)),
}
WHOLE_CHARACTERS = ("Han", "Kana", "Hangul")
"""Scripts in which one character is a fair token."""
PIECES_A_CHARACTER = 1.6
"""Of these scripts: a tokenizer that takes each character to bytes gives two or three."""
PIECES_A_WORD, OF_LONG_WORDS = 1.9, 2.1
"""Tokens a word, as white space parts them, from which a tokenizer was made for another language: those of two English models
make 1.2 to 1.3 of English, 2.0 of French, 2.2 of Dutch and 2.3 of German."""
LONG_WORDS = ("German", "Dutch")
COMMON_WORDS = {
    "English": "the and of is was that with for are this from they have which",
    "German": "der die und das ist nicht mit ein eine von auf dem den sich auch",
    "French": "les des est une dans que pour qui sur pas avec au sont nous",
    "Spanish": "los las una que por con para del como pero más está son el",
    "Italian": "che di della per non sono gli nel alla con anche più questo",
    "Portuguese": "que não uma para com os das dos mais como foi pelo ele",
    "Dutch": "het een van en dat niet zijn voor met ook maar wordt deze",
}


def check_tokens(texts: Mapping[str, Sequence[str]], tokenizer: Any) -> list[Finding]:
    """Findings about a sample of the texts of each split; one split is enough to raise one."""
    every = [text for some in texts.values() for text in spread(some, MOST_ROWS)]
    if not every:
        return []
    ids = tokenizer(every, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    counts = np.array([len(row) for row in ids])
    unknown = np.zeros(len(ids), np.int64)
    if tokenizer.unk_token_id is not None:
        unknown = np.array([row.count(tokenizer.unk_token_id) for row in ids])
    letters = count_letters(every)
    return [
        *_unknown(counts, unknown, every, tokenizer),
        *_scripts(letters, counts, unknown),
        *_languages(every, counts),
    ]


def check_cut(
    rows: int, cut: int, tokens: int, lost: int, longest: int, limit: int | None, length: int
) -> list[Finding]:
    """`longest`: tokens of which 99% of the rows have no more; `limit`: what the model can take."""
    share, words = cut / max(rows, 1), lost / max(tokens, 1)
    if not cut:
        return []
    evidence = (
        f"{cut:,} of {rows:,} rows are longer than {length} tokens and are cut; {words:.1%} of all tokens are lost."
    )
    numbers = {"rows": cut, "share": share, "tokens_lost": words, "length": length}
    if limit is None or length < limit:
        upto = longest if limit is None else min(longest, limit)
        why = "99% of the rows fit then" if upto == longest else "the model takes that many"
        advice = f"Raise --max_seq_length to {upto}: {why}."
    else:
        advice = f"The model takes no more than {limit}: --long_texts says what it sees of a longer row."
    severity: Severity = "warning" if share >= CUT_SHARE and words >= CUT_SHARE else "info"
    return [Finding("cut_rows", severity, evidence, (advice,), numbers=numbers)]


def spread(texts: Sequence[str], most: int) -> list[str]:
    """Some of the texts, from the whole length of the list."""
    if not texts:
        return []
    places = np.unique(np.linspace(0, len(texts) - 1, min(len(texts), most)).round().astype(int))
    return [texts[at] for at in places]


def count_letters(texts: Sequence[str]) -> Ints:
    """(rows, scripts): letters of each script."""
    starts = [text[:2_000] for text in texts]
    points = np.frombuffer("".join(starts).encode("utf-32-le", "replace"), np.uint32)
    rows = np.repeat(np.arange(len(texts)), [len(start) for start in starts])
    found = np.zeros((len(texts), len(SCRIPTS)), np.int64)
    for at, ranges in enumerate(SCRIPTS.values()):
        inside = np.any([(points >= low) & (points <= high) for low, high in ranges], axis=0)
        found[:, at] = np.bincount(rows[inside], minlength=len(texts))
    return found


def _unknown(counts: Ints, unknown: Ints, texts: Sequence[str], tokenizer: Any) -> list[Finding]:
    share = float(unknown.sum() / max(counts.sum(), 1))
    lost = float((unknown * 2 > counts).mean())
    if share < UNKNOWN_SHARE and lost < UNKNOWN_SHARE:
        return []
    words = Counter(word for at in np.flatnonzero(unknown)[:200] for word in texts[at].split())
    ids = tokenizer(list(words), add_special_tokens=False, verbose=False)["input_ids"]
    lacking = [word for word, found in zip(words, ids, strict=True) if tokenizer.unk_token_id in found]
    shown = ", ".join(repr(word[:20]) for word in sorted(lacking, key=lambda word: -words[word])[:5])
    evidence = f"{share:.1%} of the tokens are unknown to the tokenizer, and {lost:.1%} of the rows mostly so: {shown}."
    advice = ("Use a model whose tokenizer knows this text, such as a multilingual one.",)
    return [Finding("unknown_tokens", "warning", evidence, advice, numbers={"share": share, "rows": lost})]


def _scripts(letters: Ints, counts: Ints, unknown: Ints) -> list[Finding]:
    names = list(SCRIPTS)
    some = letters.sum(axis=1) > 0
    main = np.where(some, letters.argmax(axis=1), -1)
    shares = {name: float((main == at).mean()) for at, name in enumerate(names) if (main == at).mean() >= SCRIPT_SHARE}
    findings = []
    for name in shares:
        rows = main == names.index(name)
        pieces = float(counts[rows].sum() / max(letters[rows].sum(), 1))
        most = PIECES_A_CHARACTER if name in WHOLE_CHARACTERS else PIECES_A_LETTER
        if name == "Latin" or pieces < most or unknown[rows].any():
            continue
        evidence = (
            f"{shares[name]:.1%} of the rows are {name}, which the tokenizer spells out ({pieces:.1f} tokens a letter)."
        )
        advice = ("Use a model that was trained on this script: this one cannot read it.",)
        findings.append(
            Finding("unreadable_script", "warning", evidence, advice, numbers={"script": name, "pieces": pieces})
        )
    if len(shares) > 1 and not set(shares) <= set(WHOLE_CHARACTERS):
        words = ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
        evidence = f"The texts are written in several scripts: {words} of the rows."
        advice = ("Check that the model knows all of them, and look at the scores of each.",)
        findings.append(Finding("mixed_scripts", "info", evidence, advice, numbers=shares))
    return findings


def _languages(texts: Sequence[str], tokens: Ints) -> list[Finding]:
    """Rows by the language of their common words; only rows that are clear count. `tokens`: how many each row has."""
    common = {name: set(words.split()) for name, words in COMMON_WORDS.items()}
    rows: dict[str, list[int]] = {name: [] for name in common}
    for row, text in enumerate(texts):
        spoken = text[:500].lower().split()
        hits = sorted(((sum(w in known for w in spoken), name) for name, known in common.items()), reverse=True)
        if hits[0][0] >= 2 and hits[0][0] >= 2 * hits[1][0]:
            rows[hits[0][1]].append(row)
    clear = sum(map(len, rows.values()))
    shares = {name: len(some) / clear for name, some in rows.items() if clear >= 50 and len(some) >= 0.05 * clear}
    findings = []
    for name in shares:
        pieces = float(tokens[rows[name]].sum() / max(sum(len(texts[row].split()) for row in rows[name]), 1))
        if name != "English" and pieces >= (OF_LONG_WORDS if name in LONG_WORDS else PIECES_A_WORD):
            evidence = (
                f"{shares[name]:.0%} of the rows are {name}, of which the tokenizer makes {pieces:.1f} tokens a word."
            )
            advice = (
                f"Use a model that was trained on {name}, or a multilingual one: this one knows few of its words.",
            )
            numbers = {"language": name, "share": shares[name], "pieces": pieces}
            findings.append(Finding("foreign_language", "warning", evidence, advice, numbers=numbers))
    if len(shares) > 1:
        words = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
        evidence = f"The texts are in several languages: {words} of the rows whose language is clear."
        advice = ("Use a multilingual model, or train one model a language; look at the scores of each.",)
        findings.append(Finding("mixed_languages", "info", evidence, advice, numbers=shares))
    return findings
