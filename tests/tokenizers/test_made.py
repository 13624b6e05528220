"""What every kind of tokenizer has in common: round trips, special tokens, BOS, pieces, streams."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe_lib.errors import DataError
from recipe_lib.tokenizers import StreamDecoder, Tokenizer, load_tokenizer
from tests.tokenizers.made import NASTY, write_json, write_sentencepiece

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)
ONCE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ONCE
@given(text=TEXT)
def test_round_trip(made: Tokenizer, text: str):
    ids = made.encode(text)
    assert made.decode(ids) == text
    assert all(0 <= i < made.vocab_size for i in ids)
    assert b"".join(made.get_token_bytes(i) for i in ids).decode() in (text, " " + text)


@ONCE
@given(
    parts=st.lists(st.one_of(TEXT, st.sampled_from(["SPECIAL", " ", "the cat"])), max_size=6),
    cut=st.integers(0, 40),
)
def test_stream_is_decode(made: Tokenizer, parts: list[str], cut: int):
    ids = made.encode(
        "".join(parts).replace("SPECIAL", made.special_texts[0]), add_bos=True, allow_special=True
    )
    for skip in (True, False):
        stream = StreamDecoder(made, skip_special=skip)
        assert "".join([stream.push(i) for i in ids]) + stream.finish() == made.decode(
            ids, skip_special=skip
        )
    first = ids[:cut]
    if not made.decode(first).endswith("�"):
        rest = StreamDecoder(made, prompt=first)
        said = "".join([rest.push(i) for i in ids[cut:]]) + rest.finish()
        assert made.decode(first, skip_special=True) + said == made.decode(ids, skip_special=True)


@ONCE
@given(parts=st.lists(TEXT, min_size=1, max_size=5))
def test_pieces_join_to_the_text(made: Tokenizer, parts: list[str]):
    pieces = made.encode_pieces(parts)
    assert len(pieces) == len(parts)
    assert made.decode([i for piece in pieces for i in piece]) == "".join(parts)


def test_a_letter_is_never_cut_in_the_stream(made: Tokenizer):
    stream = StreamDecoder(made)
    parts = [stream.push(i) for i in made.encode("😀")]
    assert [part for part in parts if part] == ["😀"] and len(parts) >= 3
    half = StreamDecoder(made)
    for i in made.encode("a😀")[:-1]:
        half.push(i)
    assert half.finish() == "�"


def test_special_tokens_are_parsed_only_when_asked(made: Tokenizer):
    for special in made.special_texts:
        text = f"a{special}b"
        plain, parsed = made.encode(text), made.encode(text, allow_special=True)
        assert not any(made.is_special(i) for i in plain) and made.decode(plain) == text
        assert sum(made.is_special(i) for i in parsed) == 1 and made.decode(parsed) == text
        assert made.decode(parsed, skip_special=True) == "ab"
        pieces = made.encode_pieces(
            [f"a{special[0]}\ue000{special[1:]}b{special}"], literal="\ue000"
        )[0]
        assert pieces == [*plain, made.encode(special, allow_special=True)[-1]]


def test_bos_is_put_once(made: Tokenizer):
    assert made.bos_id is not None
    bos = made.get_token_bytes(made.bos_id).decode()
    once = made.encode("the cat", add_bos=True)
    assert once[0] == made.bos_id and made.bos_id not in once[1:]
    assert made.encode(bos + "the cat", add_bos=True, allow_special=True) == once
    assert made.encode("", add_bos=True) == [made.bos_id]
    assert made.bos_id not in made.encode("the cat")


def test_no_bos_where_there_is_none(tmp_path):
    made = load_tokenizer(write_json(tmp_path, bos_token=None))
    assert made.bos_id is None and not made.add_bos_by_default
    assert made.encode("the cat", add_bos=True) == made.encode("the cat")


@pytest.mark.parametrize(("said", "expected"), [(True, True), (False, False), (None, False)])
def test_add_bos_token_of_the_config_decides(said, expected, tmp_path):
    assert load_tokenizer(write_json(tmp_path, add_bos_token=said)).add_bos_by_default is expected


def test_sentencepiece_begins_with_bos_by_default(tmp_path):
    assert load_tokenizer(write_sentencepiece(tmp_path)).add_bos_by_default


def test_id_out_of_range_is_refused(made: Tokenizer):
    with pytest.raises(
        DataError, match=rf"found the id {made.vocab_size + 7}, expected one from 0 to"
    ):
        made.decode([made.vocab_size + 7])


@pytest.mark.parametrize("legacy", [True, False])
def test_space_after_a_special_token_follows_the_legacy_flag(legacy, tmp_path):
    write_sentencepiece(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    made = load_tokenizer(tmp_path)
    after = made.encode("</s>the", allow_special=True)[1:]
    assert (after == made.encode("the")) == legacy
    for text in ("</s>the", "</s> the", "<s>the</s>  the"):
        assert made.decode(made.encode(text, allow_special=True)) == text


def test_user_defined_pieces_that_are_special_stay_text(tmp_path):
    """A sentencepiece model finds user-defined pieces in any text by itself; a user must not write
    a turn's end.
    """
    write_sentencepiece(tmp_path, user_defined_symbols=["<turn>", "\n\n"])
    (tmp_path / "added_tokens.json").write_text("{}")
    number = load_tokenizer(tmp_path).encode("<turn>")[-1]
    config = {"added_tokens_decoder": {str(number): {"content": "<turn>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = load_tokenizer(tmp_path)
    assert (
        number not in made.encode("a<turn>b") and made.decode(made.encode("a<turn>b")) == "a<turn>b"
    )
    assert number in made.encode("a<turn>b", allow_special=True)
    assert (
        len(made.encode("a\n\nb")) == len(made.encode("ab")) + 1
    )  # other user-defined pieces are vocabulary


def test_metaspace_json_begins_a_text_with_a_space_once(tmp_path):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    for scheme in ("first", "always", "never"):
        reference = tokenizers.Tokenizer(models.BPE(byte_fallback=False))
        reference.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        reference.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.BpeTrainer(
            vocab_size=200,
            special_tokens=["<s>"],
            initial_alphabet=list("the cat sodgm:,ur▁"),
            show_progress=False,
        )
        reference.train_from_iterator(["the cat sat: the dog"] * 9, trainer)
        reference.save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path)
        for text in ("the cat", " the cat", "<s>the<s> cat", "the<s>the"):
            assert (
                ours.encode(text, allow_special=True)
                == reference.encode(text, add_special_tokens=False).ids
            )
        left, right = ours.encode_pieces(["the c", "at"])
        assert ours.decode(left + right) == "the cat" and ours.get_token_bytes(right[0])[:1] != b" "
        assert ours.decode(ours.encode("the cat")) == "the cat"


@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (True, True)])
def test_tokens_that_swallow_white_space(left, right, tmp_path):
    import tokenizers

    write_json(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"][2] |= {"lstrip": left, "rstrip": right}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    reference, ours = (
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        load_tokenizer(tmp_path),
    )
    for text in (
        "a <|im_end|> b",
        "a\n\n<|im_end|>\n\nb",
        " <|im_end|> <|bos|> <|im_end|>",
        "<|im_end|> ",
        " <|im_end|>",
    ):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, allow_special=True) == expected, text


def test_nasty_texts_of_a_model_that_collapses_spaces(tmp_path):
    import sentencepiece

    write_sentencepiece(tmp_path, remove_extra_whitespaces=True)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    made = load_tokenizer(tmp_path)
    for text in NASTY:
        assert made.encode(text) == reference.encode(text)
    left, right = made.encode_pieces(["the", "  cat"])
    assert left + right == reference.encode("the cat")
