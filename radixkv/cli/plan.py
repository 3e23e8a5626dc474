"""`radixkv plan`. Knows how a plan is asked for and shown; computes none."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from textwrap import fill
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixkv.cli.common import (
    MAX_BLOCK_SIZE,
    Json,
    advance,
    command,
    count,
    one_of,
    parse_capacities,
    progress_bar,
    show,
    table,
    whole,
)
from radixkv.cli.reading import Reading, short_name
from radixkv.configs import PRESETS, ConfigError, find_model, load_model
from radixkv.models import KV_FORMATS, WEIGHT_FORMATS, Model, kv_bytes
from radixkv.plan import (
    GIB,
    GPUS,
    MAX_BATCH,
    MAX_BUSY,
    Choice,
    Deployment,
    Estimate,
    Prices,
    Served,
    Target,
    Workload,
    assumptions,
    choose,
    deployments,
    estimate,
    find_gpu,
    one_request,
    serve,
    smallest_cache,
    trace_workload,
)
from radixkv.replay import default_capacities
from radixkv.trace import Trace

_GPU = "h100"
_CONTEXT, _OUTPUT = 8192, 256  # tokens
_MOST_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class _Request:
    """Tokens of one request; `cached` of its prompt."""

    prompt: int
    output: int
    cached: int

    @property
    def context(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class _Served:
    trace: Trace
    workload: Workload
    rows: list[Served]


@dataclass(frozen=True, slots=True)
class _Answer:
    """To a target."""

    target: Target
    smallest_cache: int | None  # of the deployment that is shown
    choice: Choice | None
    without_cache: Choice | None


@dataclass(slots=True)
class _Plan:
    """All that is shown."""

    deployment: Deployment
    request: _Request
    prices: Prices | None
    fewest_gpus: int | None  # on which the request fits, sharing the model
    estimates: list[Estimate] = field(default_factory=list)
    served: _Served | None = None
    answer: _Answer | None = None


def _real(low: float, high: float) -> Callable[[str | float], float]:
    """A parser of numbers in [low, high] whose error names the value and the bounds."""

    def parse(text: str | float) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise typer.BadParameter(f"must be a number from {low:g} to {high:g}, got {str(text)[:40]!r}")
        return number

    return parse


def _prices(text: str | Prices) -> Prices:
    """A parser of INPUT,CACHED,OUTPUT."""
    if isinstance(text, Prices):
        return text
    try:
        return Prices(*(_real(0, 1e9)(part) for part in text.split(",")))
    except (TypeError, typer.BadParameter):
        raise typer.BadParameter(f"must be INPUT,CACHED,OUTPUT, from 0 to 1e+09 each, got {text[:40]!r}") from None


@command("plan")
def plan_command(
    *,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A preset, see --list.", show_default=False)] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A model's config.json, or the folder that has it.", show_default=False),
    ] = None,
    list_presets: Annotated[
        bool, typer.Option("--list", help="List the presets of models and GPUs, and exit.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"{', '.join(GPUS)}; or GiB,TFLOPS,GB/s of another.", show_default=_GPU),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, 1024),
            metavar="N",
            help="GPUs that share a model (tensor parallel). Default: the fewest that do.",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            parser=one_of(KV_FORMATS), metavar="NAME", help=f"{', '.join(KV_FORMATS)}.", show_default="the model's"
        ),
    ] = None,
    weight_dtype: Annotated[
        str | None,
        typer.Option(
            parser=one_of(WEIGHT_FORMATS),
            metavar="NAME",
            help=f"Of linear layers: {', '.join(WEIGHT_FORMATS)}.",
            show_default="the config's",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            parser=whole(2, _MOST_TOKENS),
            metavar="N",
            help="Tokens of a request at its end, prompt and output.",
            show_default=f"the trace's mean, else {_CONTEXT}",
        ),
    ] = None,
    output: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, _MOST_TOKENS),
            metavar="N",
            help="Tokens of a request's output.",
            show_default=f"the trace's mean, else {_OUTPUT}",
        ),
    ] = None,
    cached: Annotated[
        int, typer.Option(parser=whole(0, _MOST_TOKENS), metavar="N", help="Tokens of its prompt that are cached.")
    ] = 0,
    batch: Annotated[
        int, typer.Option(parser=whole(1, 1 << 20), metavar="N", help="Requests that decode in one pass, at most.")
    ] = MAX_BATCH,
    traces: Annotated[
        list[str] | None,
        typer.Option(
            "--trace",
            metavar="FILE|-",
            help="A trace: what caches of each size save. Several are merged by time.",
            show_default=False,
        ),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="For --trace, in its blocks: 1000,3000,inf. Default: shares of them.",
            show_default=False,
        ),
    ] = None,
    ttft: Annotated[
        float | None,
        typer.Option(
            parser=_real(1e-6, 1e6), metavar="S", help="The fewest GPUs and the smallest cache for this mean TTFT."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(parser=_real(1e-9, 1e9), metavar="N", help="The same for so many requests a second."),
    ] = None,
    price: Annotated[
        Prices | None,
        typer.Option(
            parser=_prices,
            metavar="IN,CACHED,OUT",
            help="Prices of a million tokens: what the tokens cost.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(parser=whole(1, MAX_BLOCK_SIZE), metavar="N", help="Of the engine, in tokens.")
    ] = 16,
    utilization: Annotated[
        float, typer.Option(parser=_real(0.01, 1), metavar="X", help="Share of a GPU's memory that is used.")
    ] = 0.9,
    reserve: Annotated[
        float, typer.Option(parser=_real(0, 1024), metavar="GIB", help="Of it, for activations and graphs.")
    ] = 2.0,
    compute_efficiency: Annotated[
        float, typer.Option(parser=_real(0.001, 1), metavar="X", help="Share of the peak FLOP/s that is reached.")
    ] = 0.5,
    bandwidth_efficiency: Annotated[
        float, typer.Option(parser=_real(0.001, 1), metavar="X", help="Share of the peak bytes/s that is reached.")
    ] = 0.8,
    max_busy: Annotated[
        float, typer.Option(parser=_real(0.01, 1), metavar="X", help="For --rate: share of the time in use, at most.")
    ] = MAX_BUSY,
    json_file: Json = None,
    reading: Reading,
) -> None:
    """How much memory and how many GPUs: KV, weights, what fits, how fast, what it costs."""
    if list_presets:
        show(json_file, _presets, _print_presets)
        return
    chosen = _find_model(model, config)
    if not chosen.weights:
        if any(option is not None for option in (gpu, traces, ttft, rate)):
            raise typer.BadParameter(chosen.why_no_weights, param_hint="--config")
        print(f"radixkv: only KV can be planned: {chosen.why_no_weights}", file=sys.stderr)
    try:
        found_gpu = find_gpu(gpu or _GPU)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None
    make = partial(
        deployments,
        chosen,
        found_gpu,
        kv_format=kv_dtype or "",
        weight_format=weight_dtype,
        block_size=block_size,
        utilization=utilization,
        reserve=int(reserve * GIB),
        compute_efficiency=compute_efficiency,
        bandwidth_efficiency=bandwidth_efficiency,
    )
    try:
        asked = make(tp=tp) if chosen.weights else make(tp=tp or 1)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tp") from None
    capacities = parse_capacities(capacity)
    trace, workload = _read_workload(replace(reading, traces=traces)) if traces else (None, None)
    request = _request(workload, context, output, cached)
    fitting, enough = (
        [candidate for candidate in candidates if candidate.num_requests(request.context)]
        for candidates in (asked, make())
    )
    plan = _Plan((fitting or asked[-1:])[0], request, price, enough[0].tp if enough else None)
    if chosen.weights and fitting:
        plan.estimates = _estimates(plan.deployment, request, batch)
    if chosen.weights and trace is not None and workload is not None:
        plan.served = _Served(trace, workload, _serve(plan.deployment, workload, capacities, price))
    if chosen.weights and (ttft is not None or rate is not None):
        target = Target(ttft, rate or 0.0, max_busy, batch)
        load = workload or one_request(request.prompt, request.output, cached=request.cached)
        plan.answer = _Answer(
            target,
            smallest_cache(plan.deployment, load, target),
            choose(fitting, load, target),
            choose(fitting, load.without_cache(), target),
        )
    show(json_file, lambda: _result(plan), lambda: _print(plan))


# What is asked


def _find_model(name: str | None, config: str | None) -> Model:
    if (name is None) == (config is None):
        raise typer.BadParameter("name either a preset (see --list) or a --config FILE", param_hint="--model")
    try:
        return load_model(config) if config is not None else find_model(name or "")
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None


def _read_workload(reading: Reading) -> tuple[Trace, Workload]:
    with progress_bar() as bar:
        task = bar.add_task("reading", total=2)
        trace = reading.read(bar, task)
        bar.update(task, description="curve")
        return trace, trace_workload(trace, progress=partial(advance, bar, task, 1))


def _request(workload: Workload | None, context: int | None, output: int | None, cached: int) -> _Request:
    if context is None:
        context = workload.mean_context if workload else _CONTEXT
    if output is None:
        output = round(float(workload.outputs.mean())) if workload else _OUTPUT
        output = min(output, context // 2)
    if output >= context:
        raise typer.BadParameter(
            f"must be below the {context} tokens of --context, got {output}", param_hint="--output"
        )
    prompt = context - output
    if cached >= prompt:
        raise typer.BadParameter(f"must be below the prompt's {prompt} tokens, got {cached}", param_hint="--cached")
    return _Request(prompt, output, cached)


def _estimates(deployment: Deployment, request: _Request, most: int) -> list[Estimate]:
    batches = {1, max(1, min(most, deployment.num_requests(request.context)))}
    return [
        estimate(deployment, request.prompt, request.output, cached=cached, batch=batch)
        for cached in sorted({0, request.cached})
        for batch in sorted(batches)
    ]


def _serve(
    deployment: Deployment, workload: Workload, capacities: list[int | None] | None, prices: Prices | None
) -> list[Served]:
    """Without a cache, and with each capacity; by default also with what fits."""
    if capacities is None:
        fits = deployment.num_blocks * deployment.block_size // workload.block_size
        sizes = {size for size in default_capacities(workload.most_blocks) if size} | {fits} - {0}
        capacities = [*sorted(sizes), None]
    return [serve(deployment, workload, capacity, prices=prices) for capacity in (0, *capacities)]


# What is shown

_COUNTS = " KMBT"
_KINDS = {
    "full": "full attention",
    "window": "sliding window",
    "chunk": "chunked attention",
    "latent": "latent attention (MLA)",
    "index": "index of sparse attention",
    "linear": "linear attention",
    "mamba": "state space",
}


def _print(plan: _Plan) -> None:
    console = Console(highlight=False)
    deployment = plan.deployment
    model = deployment.model
    about = ""
    if model.weights:
        active = f" ({_scaled(model.num_active_parameters, _COUNTS)} active)" if model.experts[1] else ""
        about = f", {_scaled(model.num_parameters, _COUNTS)} parameters{active}"
        about += f", on {deployment.tp} x {deployment.gpu.name}"
    console.print(f"[bold]{escape(model.name)}[/bold]{about}\n")
    console.print(_layers_table(deployment), "")
    console.print(_memory_table(deployment), "")
    if model.weights:
        for line in _what_fits(plan):
            console.print(line)
        console.print()
    if plan.estimates:
        console.print(f"[bold]A request[/bold] of {plan.request.prompt:,} + {plan.request.output:,} tokens\n")
        console.print(_request_table(plan), "")
    if plan.served:
        console.print(f"[bold]{escape(short_name(plan.served.trace))}[/bold]: {_about(plan.served.workload)}\n")
        console.print(_served_table(deployment, plan.served))
        room = deployment.num_blocks * deployment.block_size // plan.served.workload.block_size
        console.print(f"\n{room:,} blocks of {plan.served.workload.block_size} tokens fit on these GPUs.\n")
    if plan.answer:
        for line in _about_answer(deployment, plan.answer, plan.served):
            console.print(line)
        console.print()
    console.print("[bold]Assumed[/bold]")
    for line in _assumed(plan):
        console.print(fill(line, console.width, initial_indent="- ", subsequent_indent="  "), markup=False)


def _layers_table(deployment: Deployment) -> Table:
    shown = table("layers", "KV heads", "elements", "keep", "bytes a token", left=1)
    for layers in deployment.model.layers:
        name = f"{layers.num:,} x {_KINDS[layers.kind]}"
        if layers.vectors:
            elements = " + ".join(map(str, layers.vectors))
            keep = f"{layers.keeps:,} tokens" if layers.keeps else "all tokens"
            shown.add_row(
                name, count(layers.num_kv_heads), elements, keep, count(kv_bytes(layers, deployment.kv_format, 1))
            )
        else:
            shown.add_row(name, "", "", "one state", "0")
    return shown


def _memory_table(deployment: Deployment) -> Table:
    model, kv_format, tp = deployment.model, deployment.kv_format, deployment.tp
    sizes = (1,) if tp == 1 else (1, tp)
    shown = table("", *("whole model", f"each of {tp} GPUs")[: len(sizes)], left=1)
    if model.weights:
        formats = "/".join(
            dict.fromkeys(model.format_of(part.part, deployment.weight_format) for part in model.weights if part.num)
        )
        shown.add_row(
            f"weights in {formats}", *(_size(model.weight_bytes(deployment.weight_format, tp=num)) for num in sizes)
        )
    for name, beyond in ((f"KV of a token in {kv_format}", False), ("KV of a token that has left all windows", True)):
        if not beyond or any(layers.keeps for layers in model.layers):
            per_token = [model.kv_bytes_per_token(kv_format, tp=num, beyond_windows=beyond) for num in sizes]
            shown.add_row(name, *(f"{size:,} B" for size in per_token))
    if model.state_bytes():
        shown.add_row("states of a request", *(_size(model.state_bytes(tp=num)) for num in sizes))
    if model.weights:
        left = _size(deployment.pool_bytes) if deployment.pool_bytes > 0 else "nothing"
        shown.add_row("left for KV", *[""] * (len(sizes) - 1), left)
    return shown


def _what_fits(plan: _Plan) -> list[str]:
    deployment, context = plan.deployment, plan.request.context
    each = f"{context:,} tokens ({_size(deployment.model.request_bytes(context, deployment.kv_format))})"
    if not deployment.num_requests(context):
        hint = f"{plan.fewest_gpus} of these GPUs are enough" if plan.fewest_gpus else "64 of these GPUs are too few"
        return [f"[bold]Does not fit[/bold], not even with one request of {each}; {hint}."]
    blocks, size = deployment.num_blocks, deployment.block_size
    return [
        f"[bold]Fits[/bold] {deployment.num_requests(context):,} requests of {each} at once, or {blocks:,} blocks",
        f"of {size} tokens, which are {blocks * size:,} tokens of cache.",
    ]


def _request_table(plan: _Plan) -> Table:
    shown = table("tokens\ncached", "\nprefill", "\nTTFT", "decode\nbatch", "\nITL", "TTFT +\noutput x ITL")
    if plan.prices:
        shown.add_column("price of\na thousand", justify="right", no_wrap=True)
    for row in plan.estimates:
        cells = [
            count(row.cached_tokens),
            _flops(row.prefill_flops),
            _time(row.ttft_s),
            count(row.batch),
            _time(row.itl_s),
            _time(row.total_s),
        ]
        if plan.prices:
            cells.append(f"{1000 * _cost(plan.request, row, plan.prices):,.2f}")
        shown.add_row(*cells)
    return shown


def _cost(request: _Request, row: Estimate, prices: Prices) -> float:
    return prices.bill(request.prompt, row.cached_tokens, request.output)


def _about(workload: Workload) -> str:
    rate = f", {workload.rate:.3g} a second" if workload.rate else ""
    return (
        f"{len(workload.prompts):,} requests{rate}; {workload.prompts.mean():,.0f} tokens of prompt and "
        f"{workload.outputs.mean():,.0f} of output on the mean"
    )


def _served_table(deployment: Deployment, served: _Served) -> Table:
    workload, rows = served.workload, served.rows
    billed = rows[0].bill is not None
    shown = table("cache\nblocks", "\nmemory", "hits\n% tokens", "prefill\nleft", "\nsaved", "TTFT\nmean", "\np90")
    if billed:
        shown.add_column("\nbill", justify="right", no_wrap=True)
    for row in rows:
        cells = [
            count(row.capacity_blocks),
            _size(_cache_bytes(deployment, workload, row.capacity_blocks)),
            f"{100 * row.hit_tokens / max(1, row.prompt_tokens):.2f}",
            _flops(row.prefill_flops),
            _flops(row.saved_flops),
            _time(row.ttft_s),
            _time(row.ttft_p90_s),
        ]
        shown.add_row(*cells, *([f"{row.bill:,.2f}"] if billed else []))
    return shown


def _cache_bytes(deployment: Deployment, workload: Workload, blocks: int | None) -> int:
    """On all GPUs; without bound, what is enough for all hits."""
    num = workload.most_blocks if blocks is None else blocks
    return num * workload.block_size * deployment.kv_bytes_per_token * deployment.tp


def _about_answer(deployment: Deployment, answer: _Answer, served: _Served | None) -> list[str]:
    target = answer.target
    goals = [f"a mean TTFT of {_time(target.ttft_s)}"] if target.ttft_s is not None else []
    if target.rate:
        goals.append(f"{target.rate:g} requests a second at {target.max_busy:.0%} of the time")
    lines = [f"[bold]For[/bold] {' and '.join(goals)}"]
    if served:
        blocks = answer.smallest_cache
        if blocks is None:
            enough = "no cache is large enough"
        elif blocks == 0:
            enough = "no cache is needed"
        else:
            enough = (
                f"a cache of {blocks:,} blocks, {_size(_cache_bytes(deployment, served.workload, blocks))}, is enough"
            )
        lines.append(f"- on {deployment.tp} x {deployment.gpu.name} {enough}")
    for name, choice in (("with the cache that fits", answer.choice), ("without a cache", answer.without_cache)):
        if choice is None:
            lines.append(f"- {name}, no number of these GPUs is enough")
            continue
        gpus = f"{choice.num_gpus:,} GPUs ({choice.num_replicas:,} x {choice.deployment.tp})"
        busy = f", busy {choice.busy:.0%}" if target.rate else ""
        lines.append(f"- {name}, {gpus}: TTFT {_time(choice.ttft_s)}{busy}")
    return lines


def _assumed(plan: _Plan) -> list[str]:
    lines = assumptions(plan.deployment) if plan.deployment.model.weights else list(plan.deployment.model.notes)
    if plan.estimates:
        lines.insert(-1, "prefill runs alone; ITL is that of a request half way through its output, without prefills")
    if plan.served:
        size = plan.served.workload.block_size
        lines[-1:-1] = [
            f"hits are those of LRU over whole blocks of {size} tokens, and the trace's tokens are the model's",
            "a cache beyond what fits is on replicas or in host memory, and comes from there at no cost",
        ]
    if plan.answer:
        lines.insert(
            -1, "replicas add up to one cache, as behind a router that knows prefixes; decode batches are full"
        )
    return lines


def _result(plan: _Plan) -> dict[str, object]:
    deployment, request = plan.deployment, plan.request
    model, kv_format = deployment.model, deployment.kv_format
    result: dict[str, object] = {
        "model": model.name,
        "kv_dtype": kv_format,
        "kv_bytes_per_token": model.kv_bytes_per_token(kv_format),
        "kv_bytes_per_token_beyond_windows": model.kv_bytes_per_token(kv_format, beyond_windows=True),
        "state_bytes_per_request": model.state_bytes(),
        "layers": [asdict(layers) | {"bytes_per_token": kv_bytes(layers, kv_format, 1)} for layers in model.layers],
        "tp": deployment.tp,
        "kv_bytes_per_token_per_gpu": deployment.kv_bytes_per_token,
        "context": request.context,
        "kv_bytes_per_request": model.request_bytes(request.context, kv_format),
        "parameters": model.num_parameters or None,
        "active_parameters": model.num_active_parameters or None,
    }
    if model.weights:
        result |= {
            "weight_bytes": round(model.weight_bytes(deployment.weight_format)),
            "weight_bytes_per_gpu": round(deployment.weight_bytes),
            "gpu": asdict(deployment.gpu),
            "kv_pool_bytes_per_gpu": max(0, deployment.pool_bytes),
            "block_size": deployment.block_size,
            "num_blocks": deployment.num_blocks,
            "num_requests": deployment.num_requests(request.context),
            "request": asdict(request),
            "estimates": [
                asdict(row) | ({"cost": _cost(request, row, plan.prices)} if plan.prices else {})
                for row in plan.estimates
            ],
        }
    if plan.served:
        result["trace"] = {
            "name": plan.served.trace.name,
            "block_size": plan.served.workload.block_size,
            "requests_per_second": plan.served.workload.rate,
            "rows": [
                asdict(row) | {"bytes": _cache_bytes(deployment, plan.served.workload, row.capacity_blocks)}
                for row in plan.served.rows
            ],
        }
    if plan.answer:
        answer = plan.answer
        result["target"] = asdict(answer.target) | {
            "smallest_cache_blocks": answer.smallest_cache,
            "choice": answer.choice and _choice(answer.choice),
            "without_cache": answer.without_cache and _choice(answer.without_cache),
        }
    result["assumptions"] = _assumed(plan)
    return result


def _choice(choice: Choice) -> dict[str, object]:
    return {
        "gpus": choice.num_gpus,
        "replicas": choice.num_replicas,
        "tp": choice.deployment.tp,
        "cache_blocks": choice.num_blocks,
        "ttft_s": choice.ttft_s,
        "busy": choice.busy,
    }


def _presets() -> dict[str, object]:
    models = []
    for name in PRESETS:
        model = find_model(name)
        models.append(
            {
                "model": name,
                "parameters": model.num_parameters,
                "active_parameters": model.num_active_parameters,
                "weight_bytes": model.weight_bytes(),
                "kv_bytes_per_token": model.kv_bytes_per_token(model.dtype),
                "kv_bytes_per_token_beyond_windows": model.kv_bytes_per_token(model.dtype, beyond_windows=True),
            }
        )
    return {"models": models, "gpus": [{"gpu": name, **asdict(gpu)} for name, gpu in GPUS.items()]}


def _print_presets() -> None:
    console = Console(highlight=False)
    shown = table("--model", "parameters", "active", "weights", "KV bytes\na token", "beyond\nwindows", left=1)
    for name in PRESETS:
        model = find_model(name)
        sizes = [model.kv_bytes_per_token(model.dtype, beyond_windows=beyond) for beyond in (False, True)]
        shown.add_row(
            name,
            _scaled(model.num_parameters, _COUNTS),
            _scaled(model.num_active_parameters, _COUNTS),
            _size(model.weight_bytes()),
            count(sizes[0]),
            count(sizes[1]) if sizes[0] != sizes[1] else "",
        )
    console.print(shown, "")
    shown = table("--gpu", "", "memory", "GB/s", "TFLOP/s\nbf16", "\nfp8", left=2)
    for name, gpu in GPUS.items():
        peaks = [f"{flops / 1e12:,.0f}" for flops in (gpu.flops, gpu.flops_fp8)]
        shown.add_row(name, gpu.name, _size(gpu.memory), f"{gpu.bandwidth / 1e9:,.0f}", *peaks)
    console.print(shown)


def _size(num_bytes: float) -> str:
    """In binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def _scaled(number: float, units: str = " KMGTPE") -> str:
    """In decimal units, to three digits."""
    for unit in units:
        if number < 999.5 or unit == units[-1]:
            break
        number /= 1000
    return f"{_digits(number)} {unit}".rstrip()


def _flops(number: float) -> str:
    return f"{_scaled(number)}FLOP" if number else "0"


def _time(seconds: float) -> str:
    return f"{_digits(seconds)} s" if seconds >= 0.9995 else f"{_digits(seconds * 1000)} ms"


def _digits(number: float) -> str:
    """Three of them, and all before the point."""
    return f"{number:,.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"
