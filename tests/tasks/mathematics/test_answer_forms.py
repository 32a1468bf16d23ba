# SPDX-License-Identifier: Apache-2.0
r"""Forms of answers that a reader accepts, and forms that a reader rejects.

A list without brackets has no order, since MATH lists solutions that way, but it has repetitions. A decimal is the
number that it writes: 0.333 is not 1/3; but a gold one of three or more digits is rounded. Units are compared
where both have one. A numeral in another base equals only itself.
"""

import pytest

from evoalign.tasks.answers import is_equal

RIGHT = {
    "numbers": [
        ("72", "72"), ("72.00", "72"), ("142", "142.0"), ("142.0", "142"), ("1,200", "1200"), ("\\$1{,}200", "1200"),
        ("1\\,000", "1000"), ("1,\\!000", "1000"), ("1\\ 000", "1000"), ("10 000", "10000"), ("10\u202f000", "10,000"),
        ("12,345,678", "12345678"), ("(1,000)", "1000"), ("1,000x", "1000x"), ("\\frac{1,000}{3}", "\\frac{1000}{3}"),
        ("-0", "0"), ("+5", "5"), (".5", "0.5"), ("5.", "5"), ("1e3", "1000"), ("4.5e-2", "0.045"), ("2^{10}", "1024"),
        ("6.0e23", "6\\cdot 10^{23}"), ("2 \\text{ million}", "2000000"), ("007", "7"), ("5!", "120"),
    ],
    "fractions": [
        ("0.5", "\\frac{1}{2}"), ("\\dfrac{6}{8}", "\\frac34"), ("-1/2", "-\\frac12"),
        ("\\frac{-1}{2}", "-\\frac{1}{2}"),
        ("1\\frac{1}{2}", "\\frac{3}{2}"), ("1 1/2", "\\frac32"), ("1 \\frac{1}{2}", "1.5"), ("\\frac 1 2", "0.5"),
        ("0.\\overline{3}", "\\frac13"), ("1.2\\overline{45}", "\\frac{137}{110}"), ("6:8", "3:4"), ("2/4", "1/2"),
        ("0.125", "2^{-3}"), ("\\frac{2}{\\sqrt{2}}", "\\sqrt2"), ("3.5x", "\\frac{7x}{2}"), ("x^{0.5}", "\\sqrt{x}"),
    ],
    "rounded right answers": [
        ("1/12", "0.0833"), ("\\pi", "3.14"), ("-\\frac{1}{12}", "-0.0833"), ("\\frac13", "0.33333333"),
        ("4.488 \\times 10^{33}", "4.49e33"), ("1.299e4", "1.30e4"), ("\\ln 2", "0.693"),
    ],
    "unicode": [
        ("−5", "-5"), ("5−3", "2"), ("½", "\\frac{1}{2}"), ("2¾", "\\frac{11}{4}"), ("√2", "\\sqrt{2}"), ("π", "\\pi"),
        ("√(x+1)", "\\sqrt{x+1}"), ("√3/2", "\\frac{\\sqrt3}{2}"), ("∛5", "\\sqrt[3]{5}"), ("3×4", "12"), ("x²", "x^2"),
        ("x⁻¹⁰", "x^{-10}"), ("2π/3", "\\frac{2\\pi}{3}"), ("(−∞, 2]", "(-\\infty,2]"), ("x ≤ 2", "x\\le 2"),
        ("[0,1)∪(2,3]", "[0,1)\\cup(2,3]"), ("90°", "90"), ("±3", "\\pm 3"), ("２", "2"), ("8÷2", "4"),
    ],
    "marks": [
        ("**73**", "73"), ("$73$", "73"), ("\\(73\\)", "73"), ("$$x+1$$", "x+1"), ("`73`", "73"), ("73.", "73"),
        ("\\text{13}", "13"), ("13", "\\text{13}"), ("\\textbf{(B)}\\ 12", "12"), ("\\text{(B)}", "B"),
        ("\\text{(C)}", "(C)"), ("\\left(\\frac12, 3\\right)", "(0.5,3)"),
    ],
    "units": [
        ("10 \\text{ cm}", "10"), ("10", "10\\text{ cm}"), ("10\\,\\mathrm{cm}", "10\\text{ centimeters}"),
        ("10 cm", "10\\mbox{ cm}"), ("18 dollars", "18"), ("\\$18", "18 \\text{ dollars}"), ("\\$18", "18"),
        ("18 apples", "18"), ("18 \\text{ apples}", "18"), ("5 \\text{ hrs}", "5\\text{ hours}"), ("€5", "5"),
        ("6 \\text{ square inches}", "6\\text{ in}^2"), ("60 \\text{ mph}", "60\\text{ miles per hour}"),
        ("60\\text{ km}/\\text{h}", "60\\text{ km/h}"), ("90 \\text{ degrees}", "90^\\circ"), ("90", "90^\\circ"),
        ("25^\\circ\\text{C}", "25^\\circ"), ("50\\%", "50"), ("0.5", "50\\%"), ("50 percent", "50\\%"),
        ("\\text{5 hours}", "5"), ("\\frac{1}{2}\\text{ hour}", "0.5"), ("2\\sqrt{3} cm", "2\\sqrt3"),
    ],
    "lists": [
        ("3,2,1", "1,2,3"), ("-2, 1", "1,-2"), ("1 and 2", "1,2"), ("1, 2, \\text{ and } 3", "1,2,3"),
        ("x=1 or x=2", "1,2"),
        ("\\pm 3", "3,-3"), ("\\{2,1\\}", "\\{1,2\\}"), ("1,2", "\\{1,2\\}"), ("x \\in \\{1,2\\}", "\\{1,2\\}"),
        ("(1,2)", "1,2"), ("A, B", "\\text{B, A}"), ("1, 1, 2", "2,1,1"), ("(1,2),(3,4)", "(3,4),(1,2)"),
        ("2:4:6", "1:2:3"), ("\\frac14, 1/3", "\\frac13,\\frac14"), ("1+\\sqrt2, 1-\\sqrt2", "1\\pm\\sqrt2"),
    ],
    "inequalities": [
        ("x<2", "(-\\infty,2)"), ("(-\\infty,2)", "x<2"), ("x \\ge 2", "[2,\\infty)"), ("2>x", "x<2"),
        ("1<x<2", "(1,2)"), ("x\\in[1,2)", "[1,2)"), ("(3,\\infty)\\cup(-\\infty,2)", "(-\\infty,2)\\cup(3,\\infty)"),
    ],
    "algebra": [
        ("(x+1)^2", "x^2+2x+1"), ("\\sqrt{\\frac{1}{n}}", "\\frac{1}{\\sqrt{n}}"), ("14.0 + -1.0i", "14 - i"),
        ("2i+3", "3+2i"), ("x=5", "5"), ("5", "x=5"), ("y = -\\frac{1}{2}x+\\frac{3}{4}", "2x+4y-3=0"),
        ("-1 + e^{16}", "e^{16} - 1"), ("-2*\\pi", "-2\\pi"), ("\\sqrt{ab}\\sqrt{ab}", "ab"), ("\\log_2 8", "3"),
        ("\\sqrt{7+4\\sqrt{3}}", "2+\\sqrt{3}"),
        ("\\begin{bmatrix}1\\\\2\\end{bmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("\\text{ Even }", "\\text{even}"), ("Monday", "\\text{Monday}"), ("11_{2}", "11_2"), ("\\binom{5}{2}", "10"),
        ("\\frac{1}{2^{60}}", "2^{-60}"), ("\\frac{x}{2^{60}}", "2^{-60}x"),
    ],
}  # fmt: skip
REFUSED = [
    ("10_2", "2"), ("\\frac{\\pi}{2}", "90^\\circ"), ("Y(x)=A+\\frac{B}{x}-x", "Y(x)=-x+C+\\frac{D}{x}"), ("5 m", "5"),
    ("3.14159", "3.14"),
]  # fmt: skip
"""Known limits: right, and not accepted. `5 m` is also the product of 5 and m."""
WRONG = {
    "tiny": [
        *((f"\\frac{{1}}{{2^{{{n}}}}}", f"\\frac{{1}}{{2^{{{n + 1}}}}}") for n in (20, 55, 60, 98, 500, 2000)),
        ("-\\frac{1}{2^{60}}", "\\frac{1}{2^{60}}"), ("\\frac{3}{4^{30}}", "\\frac{1}{4^{30}}"), ("2^{-60}", "2^{-61}"),
        ("\\frac{1}{3^{40}}", "\\frac{1}{3^{41}}"), ("\\frac{1}{20!}", "\\frac{1}{21!}"), ("\\frac{5}{2^{60}}", "0"),
        ("1+\\frac{1}{2^{60}}", "1"), ("\\sqrt{2}+2^{-90}", "\\sqrt2"), ("\\frac{x}{2^{60}}", "\\frac{x}{2^{61}}"),
        ("(\\frac{1}{2^{60}},1)", "(\\frac{1}{2^{61}},1)"), ("x<\\frac{1}{2^{60}}", "x<\\frac{1}{2^{61}}"),
        ("[0,2^{-60})", "[0,2^{-61})"), ("\\{2^{-60},1\\}", "\\{2^{-61},1\\}"), ("10^{-20}\\pi", "10^{-21}\\pi"),
        ("\\begin{pmatrix}2^{-60}\\\\1\\end{pmatrix}", "\\begin{pmatrix}2^{-61}\\\\1\\end{pmatrix}"),
        ("e^{-100}", "e^{-101}"), ("2^{-60}i", "2^{-61}i"), ("1e-20", "1e-21"), ("10^{-20}", "0"),
    ],
    "decimals": [
        ("0.33333333", "\\frac{1}{3}"), ("0.66667", "\\frac23"), ("3.1415927", "\\pi"), ("1.41421356", "\\sqrt{2}"),
        ("0.333", "\\frac13"), ("72.01", "72"), ("(0.33333333,1)", "(\\frac13,1)"),
        ("33.33333333\\%", "\\frac13"), ("0.1428571428x", "\\frac{x}{7}"), ("0.\\overline{3}", "0.3"),
        ("D = (0, 1.5)", "D = (0, 1)"), ("0.5\\%", "0.5"), ("2.71828183", "e"),
        ("0.34", "0.333"), ("0.3336", "0.333"), ("142.03", "142.0"), ("0.52", "0.5"), ("4.5e33", "4.49e33"),
        ("-0.0833", "0.0833"), ("0.333i", "0.333"), ("0.333,0.334", "0.333"),
        ("12.46", "12.5"), ("33.33", "33.3"), ("\\frac{249}{20}", "12.5"), ("2 \\cdot 6.23", "12.5"),
        ("\\frac{24.92}{2}", "12.5"), ("\\frac{66.66}{2}", "33.3"), ("6.23+6.23", "12.5"),
    ],
    "units": [
        ("10 \\text{ cm}", "10 \\text{ m}"), ("5 \\text{ hours}", "5 \\text{ minutes}"), ("5 hours", "5 \\text{ min}"),
        ("10\\text{ cm}^2", "10\\text{ cm}"), ("10\\text{ cm}^3", "10\\text{ square cm}"),
        ("5 \\text{ mph}", "5\\text{ km/h}"),
        ("18 \\text{ cents}", "\\$18"), ("€18", "\\$18"), ("5\\text{ kg}", "5\\text{ g}"),
        ("25^\\circ C", "25^\\circ F"),
        ("90^\\circ", "90 \\text{ cm}"), ("2t", "2"), ("2", "2t"), ("3c", "3d"), ("x^2h", "x^2"), ("5m", "5"),
        ("5\\text{ or more}", "5"), ("6 or 7", "6"), ("2 \\text{ million}", "2"), ("11\\text{ cm}", "10\\text{ cm}"),
    ],
    "lists": [
        ("(1,000)", "(1,0)"), ("(2,1)", "(1,2)"), ("1,1,2", "1,2,2"), ("1,1", "1"), ("1", "1,1"), ("1,2", "1,2,3"),
        ("(3,2)", "2,3"), ("[1,2]", "(1,2)"), ("(1,2]", "[1,2)"), ("(2,3)", "\\{2,3\\}"), ("1:2:3", "1:2:4"),
        ("3:4", "3:5"), ("1:2:3", "1:3:2"),
        ("n=1, 2, 3", "n=2, 3, 4"), ("21, 36, and 82", "19, 46, \\text{ and } 82"), ("2021", "\\pm 2021"),
        ("3", "3,-3"),
        ("1, 3, 5, \\ldots, 2n-1", "1, 2, \\ldots, n"), ("\\{1,2\\}", "\\{1,3\\}"), ("100,200", "100,300"),
    ],
    "side by side": [
        ("10 000", "0"), ("10 000", "10"), ("7 2", "14"), ("7 2", "72"), ("1 1/2", "1/2"), ("2\\,3", "6"),
        ("1 000", "0"),
        ("1.5 2", "3"), ("2 \\frac{1}{2}", "1"), ("2½", "1"),
    ],
    "others": [
        ("\\frac{1}{2006!}", "\\frac{1}{2004!}"), ("\\frac{1}{7!}", "\\frac{1}{5!}"),
        ("1 + \\frac{1}{e}", "1 - \\frac{1}{e}"),
        ("1:00", "12:00"), ("3x-1y+13=0", "3x+4y+14=0"), ("4\\sqrt(2)", "4"), ("f(x)=0", "\\forall x>0, f(x)=0"),
        ("", "0"), ("0", ""), ("B", "\\text{(C)}"), ("11_2", "11_3"), ("1101", "1101_2"), ("13", "1101_2"),
        ("x>2", "x<2"),
        ("x \\le 2", "x<2"), ("x<2", "(-\\infty,2]"), ("\\infty", "-\\infty"), ("i", "-i"), ("a+bi", "a-bi"),
        ("x", "|x|"),
        ("\\sqrt{x^2}", "x"), ("\\sqrt{x^2y^2}", "xy"), ("\\text{even}", "\\text{odd}"), ("x^2+2x+2", "(x+1)^2"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}"), ("3.14", "\\pi"),
        ("x^3", "x²"),
        ("1e3", "13"), ("\\sqrt{x}", "x"), ("-\\frac{1}{\\sqrt{n}}", "\\sqrt{\\frac1n}"), ("3", "3\\pi"), ("10", "1,0"),
    ],
}  # fmt: skip


@pytest.mark.first("numbers", "units", "marks", others="slow")
@pytest.mark.parametrize("kind", RIGHT)
def test_is_equal_accepts_what_a_reader_accepts(kind):
    assert [pair for pair in RIGHT[kind] if not is_equal(*pair)] == []


@pytest.mark.first("tiny", "decimals", "units", "side by side", others="slow")
@pytest.mark.parametrize("kind", WRONG)
def test_is_equal_rejects_other_answers(kind):
    assert [pair for pair in WRONG[kind] if is_equal(*pair)] == []


def test_the_table_covers_at_least_120_right_forms_and_refuses_at_most_5():
    assert len([pair for pairs in RIGHT.values() for pair in pairs]) >= 120 - len(REFUSED) and len(REFUSED) <= 5
    assert [pair for pair in REFUSED if is_equal(*pair)] == []
