"""`make demo`: a real model without and with the cache, then a replay. Knows what to show, not how it is done."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from radixkv import cli

if TYPE_CHECKING:
    from radixkv.integrations.chat import Turn

BLOCK_SIZE = 16
SYSTEM = """\
You are a friendly travel assistant. You help people to plan journeys, to choose places, food and things to see, and \
to get along in a foreign country.

How you answer:
- Answer in one or two short sentences. People read you on a phone, often while they walk.
- Answer the question first. Give the reason after it, if there is room.
- Use simple words and a warm tone. No lists, no headings, no emojis.
- If you do not know something, say so. Never invent prices, opening hours or telephone numbers.
- Use the metric system: kilometres, degrees Celsius, litres.
- When you name a place, say in which country it is, unless that is clear already.
- When somebody asks for a word in another language, give the word and how to say it.

What you know about your guests:
- Most of them travel by train or by bicycle, and prefer small towns, markets, museums and mountains to shopping.
- Many travel with children. Suggest what both can enjoy, and think of breaks, shade and water.
- They like to eat what people of the region eat, and half of them eat no meat.

Safety comes first:
- In an emergency in Europe, the number to call is 112.
- Warn of strong sun, high water and thin air where it matters, in a few words.
- Do not give medical advice. Say that a doctor or a pharmacy can help.

Stay polite if somebody is rude, and stay with the subject of travelling. Wish people a good journey when they say \
goodbye."""
CHAT = [
    "What is the capital of France?",
    "What is that city famous for?",
    "Which river flows through it?",
    "What is the Louvre?",
    "What should I eat there?",
]
BATCH = [
    "What is the capital of Italy?",
    "What is the Colosseum?",
    "What is Venice famous for?",
    "What is sushi?",
    "What is a passport for?",
    "Name three famous rivers.",
]
MAX_NEW_TOKENS = {"chat": 32, "batch": 20}


def run() -> int:
    """Show what the cache does for a chat and for a batch on SmolLM2-135M-Instruct, then the replay table.

    Less than a minute of CPU time, and the conversion of the model when it is run first. Where a package is missing, it
    says so and shows the replay only. Returns the exit code.

    Raises: AssertionError if a reply is not the same with the cache as without.
    """
    console = Console(highlight=False)
    try:
        _show_model(console)
    except ModuleNotFoundError as error:
        console.print(f"[bold]The part with a real model is left out.[/bold] {escape(str(error))}")
    _heading(console, "What cache memory buys: the requests of a chat service, replayed")
    return cli.main(["replay", "--synthetic"])


@dataclass(frozen=True, slots=True)
class _Batch:
    """One `generate` of several prompts. Times are wall seconds; token counts are of all rows."""

    tokens: list[list[int]]  # the replies, padded
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft: float
    itl: float
    total: float


def _show_model(console: Console) -> None:
    """Raises: ModuleNotFoundError where the demo's extra is not installed."""
    from radixkv.integrations import smollm2

    if not smollm2.is_converted():
        console.print("SmolLM2 is converted first, once: some 20 seconds.", style="dim")
    with console.status("loading SmolLM2-135M-Instruct"):
        model, tokenizer = _quietly(smollm2.load)
    import torch

    from radixkv.integrations.hf import RadixCache

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two are far slower than one where somebody else is at work as well
    try:
        _show_chat(console, model, tokenizer, RadixCache(model, "128MiB", block_size=BLOCK_SIZE))
        _show_batch(console, model, tokenizer, RadixCache(model, "128MiB", block_size=BLOCK_SIZE))
    finally:
        torch.set_num_threads(num_threads)


def _show_chat(console: Console, model: Any, tokenizer: Any, cache: Any) -> None:
    from radixkv.integrations.chat import RadixChat

    settings: dict[str, Any] = {"system": SYSTEM, "max_new_tokens": MAX_NEW_TOKENS["chat"], "do_sample": False}
    without, cached = (RadixChat(model, tokenizer, each, **settings) for each in (None, cache))
    with console.status("warming up"):  # a model's first call is slower
        without.fork().send("Hello", max_new_tokens=4)
    console.print(
        f"SmolLM2-135M-Instruct in float32 on one CPU thread, blocks of {BLOCK_SIZE} tokens.\n"
        "Everything is done without the cache and with it, and the replies are compared.\n"
        "TTFT: time to first token. ITL: time from one token to the next."
    )
    _heading(console, f"A chat of {len(CHAT)} turns behind a system prompt of {len(tokenizer.encode(SYSTEM))} tokens")
    turns: list[tuple[Turn, Turn]] = []
    for number, question in enumerate(CHAT, 1):
        with console.status(f"turn {number} of {len(CHAT)}"):
            turns.append((without.send(question), cached.send(question)))
        plain, turn = turns[-1]
        _check_same(question, list(plain.tokens), list(turn.tokens))
        _say(console, question, tokenizer, list(turn.tokens), MAX_NEW_TOKENS["chat"])
    console.print()
    table = _table(
        "\nturn",
        "prompt\ntokens",
        "\ncached",
        "\nprefilled",
        "TTFT\nwithout",
        "\nwith",
        "\nfaster",
        "ITL\nwithout",
        "\nwith",
    )
    for number, (plain, turn) in enumerate(turns, 1):
        table.add_row(
            str(number),
            f"{turn.num_prompt_tokens:,}",
            f"{turn.num_cached_tokens:,}",
            f"{turn.num_prefill_tokens:,}",
            f"{plain.ttft:.2f} s",
            f"{turn.ttft:.2f} s",
            f"{plain.ttft / turn.ttft:.1f} x" if turn.num_cached_tokens else "-",
            f"{1000 * plain.itl:.0f} ms",
            f"{1000 * turn.itl:.0f} ms",
        )
    console.print(table)
    console.print(f"\n[green]The same text[/green], token for token, in all {len(turns)} replies.")
    totals = [sum(turn.total for turn in chat) for chat in zip(*turns, strict=True)]
    console.print(f"The whole chat: {totals[0]:.1f} s without the cache, {totals[1]:.1f} s with it.")


def _show_batch(console: Console, model: Any, tokenizer: Any, cache: Any) -> None:
    _heading(console, f"{len(BATCH)} questions in one batch, behind the same system prompt")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for question in BATCH
    ]
    inputs = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    batches: dict[str, _Batch] = {}
    for name, each in (("without", None), ("with, empty", cache), ("with, again", cache)):
        with console.status(f"{name}: {len(BATCH)} prompts"):
            batches[name] = _generate(model, inputs, each)
        _check_same(name, batches["without"].tokens, batches[name].tokens)
    for question, reply in zip(BATCH, batches["without"].tokens, strict=True):
        _say(console, question, tokenizer, reply, MAX_NEW_TOKENS["batch"])
    console.print()
    table = _table("\ncache", "prompt\ntokens", "\ncached", "\nprefilled", "\nTTFT", "\nfaster", "\nITL", "\ntotal")
    for name, batch in batches.items():
        table.add_row(
            name,
            f"{batch.num_prompt_tokens:,}",
            f"{batch.num_cached_tokens:,}",
            f"{batch.num_prompt_tokens - batch.num_cached_tokens:,}",
            f"{batch.ttft:.2f} s",
            f"{batches['without'].ttft / batch.ttft:.1f} x" if batch.num_cached_tokens else "-",
            f"{1000 * batch.itl:.0f} ms",
            f"{batch.total:.1f} s",
        )
    console.print(table)
    console.print(f"\n[green]The same text[/green], token for token, in all {len(BATCH)} replies of the three runs.")
    console.print("An empty cache helps as well: what prompts share is computed for the first only.")


def _generate(model: Any, inputs: Any, cache: Any) -> _Batch:
    from contextlib import nullcontext

    from radixkv.integrations.chat import Clock

    clock = Clock()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    settings = {"max_new_tokens": MAX_NEW_TOKENS["batch"], "do_sample": False}
    began = perf_counter()
    with nullcontext() if cache is None else cache.session(ids, mask) as session:
        kwargs = {} if session is None else session.kwargs
        output = model.generate(ids, attention_mask=mask, streamer=clock, **settings, **kwargs)
    return _Batch(
        tokens=output[:, ids.shape[1] :].tolist(),
        num_prompt_tokens=int(mask.sum()),
        num_cached_tokens=0 if session is None else session.num_cached_tokens,
        ttft=clock.times[0] - began,
        itl=(clock.times[-1] - clock.times[0]) / max(1, len(clock.times) - 1),
        total=clock.times[-1] - began,
    )


def _quietly(load: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Without the progress bars of transformers, which would be drawn over ours."""
    from transformers.utils import logging as logging_module

    logging: Any = logging_module
    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return load()
    finally:
        if is_shown:
            logging.enable_progress_bar()


def _check_same(what: str, without: object, cached: object) -> None:
    assert without == cached, f"{what}: the reply is {without} without the cache, but {cached} with it"


def _heading(console: Console, text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}[/bold]", align="left")


def _say(console: Console, question: str, tokenizer: Any, reply: list[int], limit: int) -> None:
    """A question and its reply; dots where the reply was cut off."""
    dots = " ..." if len(reply) == limit and tokenizer.eos_token_id not in reply else ""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("user", Text(question))
    grid.add_row("model", Text(" ".join(tokenizer.decode(reply, skip_special_tokens=True).split()) + dots))
    console.print(grid)


def _table(first: str, *headers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for header in headers:
        style = "bold green" if header.strip() == "faster" else None
        table.add_column(header, justify="right", no_wrap=True, style=style)
    return table


if __name__ == "__main__":
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)
