"""Which GGUF file is taken: by name, by what is served, and by the memory of the machine."""

from __future__ import annotations

import pytest

from pegainfer.app.quants import choose_file, formats_of, memory_for, quant_of
from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.ops.tensor import WEIGHTS

GIB = 1 << 30
SERVED = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k")
FILES = {
    "M-Q2_K.gguf": 3 * GIB, "M-Q4_0.gguf": 4 * GIB, "M-Q4_K_S.gguf": 4 * GIB, "M-Q4_K_M.gguf": 5 * GIB,
    "M-Q5_K_M.gguf": 6 * GIB, "M-Q6_K.gguf": 7 * GIB, "M-Q8_0.gguf": 8 * GIB, "M-F16.gguf": 16 * GIB,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("BF16/Qwen3-30B-BF16-00001-of-00003.gguf", "BF16"),
        ("Llama-3.2-1B-Instruct-f16.gguf", "F16"),
        ("m-fp16.gguf", "F16"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-IQ4_XS.gguf", "IQ4_XS"),
        ("Q8_0/m-Q4_1.gguf", "Q4_1"),
        ("model.gguf", None),
        ("MQ4_0x.gguf", None),
    ],
)
def test_quantisation_of_a_name(path: str, quant: str | None) -> None:
    assert quant_of(path) == quant


@pytest.mark.parametrize(
    ("quant", "formats"),
    [
        ("Q4_K_M", ("q4_k", "q6_k")),
        ("Q4_K_S", ("q4_k", "q5_k")),
        ("Q5_K_M", ("q5_k", "q6_k")),
        ("UD-Q4_K_XL", ("q4_k",)),
        ("Q8_0", ("q8_0",)),
        ("BF16", ("bf16",)),
        ("IQ2_XXS", ("iq2_xxs",)),
        ("IQ4_XS", ("iq4_xs",)),
        ("IQ3_M", ("iq3_s",)),
        ("UD-Q8_K_XL", ("q8_0",)),
        ("Q3_K_L", ("q3_k", "q5_k", "q6_k")),
        ("MXFP4_MOE", ("mxfp4", "q8_0")),
    ],
)
def test_formats_in_a_file(quant: str, formats: tuple[str, ...]) -> None:
    assert formats_of(quant) == formats


@pytest.mark.parametrize(
    ("memory", "file", "reason"),
    [
        (64, "M-Q4_K_M.gguf", "the usual balance of size, speed and accuracy; 5.8 of 64.0 GiB free"),
        (
            5,
            "M-Q4_0.gguf",
            "4.7 of 5.0 GiB free; Q4_K_M does not fit, Q6_K does not fit, Q8_0 does not fit, ",
        ),
        (2, "M-Q4_0.gguf", "none fits into the 2.0 GiB that are free; this is the smallest"),
    ],
)
def test_the_best_that_is_served_and_fits(memory: int, file: str, reason: str) -> None:
    choice = choose_file("o/m", FILES, SERVED, memory * GIB)
    assert (choice.files, choice.why[: len(reason)]) == ((file,), reason)


def test_a_better_one_that_is_not_served_is_told_of() -> None:
    files = {path: n for path, n in FILES.items() if "Q4_K_M" not in path}
    choice = choose_file("o/m", files, SERVED, 64 * GIB)
    assert choice.files == ("M-Q6_K.gguf",)
    assert choice.why.endswith("free; Q4_K_S: q5_k not served, Q5_K_M: q5_k not served")
    with_q5 = choose_file("o/m", files, (*SERVED, "q5_k"), 64 * GIB)
    assert with_q5.files == ("M-Q4_K_S.gguf",)


def test_what_is_no_model_of_its_own_is_left_out() -> None:
    files = {"mmproj-M-F16.gguf": GIB, "M-Q4_K_M-00001-of-00002.gguf": GIB, "M-F16.gguf": 2 * GIB}
    assert choose_file("o/m", files, SERVED, 64 * GIB).files == ("M-F16.gguf",)
    del files["M-F16.gguf"]
    with pytest.raises(UnsupportedError, match=r"1 of 2 parts; mmproj-M-F16\.gguf: not a language model"):
        choose_file("o/m", files, SERVED, 64 * GIB)


def test_what_is_named_is_taken_whatever_it_needs() -> None:
    assert choose_file("o/m", FILES, SERVED, GIB, quant="f16").files == ("M-F16.gguf",)
    assert choose_file("o/m", FILES, SERVED, GIB, file="M-Q4_K_M.gguf").files == ("M-Q4_K_M.gguf",)
    with pytest.raises(UnsupportedError, match=r"expected f32 .*; got q2_k; at M-Q2_K\.gguf"):
        choose_file("o/m", FILES, SERVED, GIB, file="M-Q2_K.gguf")
    with pytest.raises(ConfigError, match=r"expected 2 parts; got 1; at a-Q8_0-00001-of-00002\.gguf"):
        choose_file("o/m", {"a-Q8_0-00001-of-00002.gguf": 1}, SERVED, GIB, quant="q8_0")
    with pytest.raises(ConfigError, match="more than one such GGUF file"):
        choose_file("o/m", {"a-Q8_0.gguf": 1, "b-Q8_0.gguf": 1}, SERVED, GIB, quant="q8_0")
    with pytest.raises(ConfigError, match=r"has no such GGUF file; expected M-F16\.gguf .*got Q9"):
        choose_file("o/m", FILES, SERVED, GIB, quant="Q9")


def test_a_model_in_parts_is_one_model_of_the_size_of_all_parts() -> None:
    parts = tuple(f"Q8_0/M-Q8_0-{n:05}-of-00003.gguf" for n in (1, 2, 3))
    files = dict.fromkeys(reversed(parts), 4 * GIB) | {"M-Q4_1.gguf": 7 * GIB}
    assert choose_file("o/m", files, SERVED, 16 * GIB).files == parts
    choice = choose_file("o/m", files, SERVED, 8 * GIB)
    assert (choice.files, choice.why) == (("M-Q4_1.gguf",), "8.0 of 8.0 GiB free; Q8_0 does not fit")
    assert choose_file("o/m", files, SERVED, GIB, quant="Q8_0").files == parts
    for part in parts:
        assert choose_file("o/m", files, SERVED, GIB, file=part).files == parts
    with pytest.raises(UnsupportedError, match=r"got q8_0; at Q8_0/M-Q8_0-00001-of-00003\.gguf"):
        choose_file("o/m", files, ("f32",), GIB, quant="q8_0")


def test_parts_of_another_number_are_another_model() -> None:
    files = {f"M-F16-{n:05}-of-{count:05}.gguf": n * GIB for count in (2, 3) for n in range(1, count + 1)}
    files |= {"M-F16.gguf": 9 * GIB}
    smallest = choose_file("o/m", files, SERVED, 16 * GIB)
    assert smallest.files == ("M-F16-00001-of-00002.gguf", "M-F16-00002-of-00002.gguf")
    with pytest.raises(ConfigError, match="more than one such GGUF file"):
        choose_file("o/m", files, SERVED, GIB, quant="f16")


@pytest.mark.parametrize("quant", ["Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "Q4_K_S"])
def test_what_the_kernels_read_is_chosen(quant: str) -> None:
    assert choose_file("o/m", {f"M-{quant}.gguf": GIB}, WEIGHTS, 8 * GIB).files == (f"M-{quant}.gguf",)


def test_memory_is_more_than_the_file() -> None:
    assert memory_for(10 * GIB) == 11 * GIB + (256 << 20)
