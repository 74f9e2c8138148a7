"""How good a SEDD model is: the validation bound on -ln p, the best checkpoint, samples.

Results are the same for any number of ranks: the noise of validation is seeded by the protein, and
samples are seeded by the step.
"""
import math

import numpy as np
import torch

from ddp_setup import all_sum, seed_for
from ddp_watch import note_progress
from proteins.letters import X_ID, decode
from proteins.seeds import keyed_generator
from proteins.sequences import collate, random_crops
from sedd.batches import batches_within, to_device
from sedd.bounds import TIME_EPS, Unigram
from sedd.diffusion import sample, score_entropy_loss
from training.files import write_text_atomic
from training.loop import ADVICE, Diverged, eval_mode, record_score
from training.precision import autocast
from training.problems import in_columns
from training.resume import save_run

SAMPLED_POSITIONS = 2**14   # positions of proteins that are sampled together, to limit memory
EVAL_PROTEINS = 16    # proteins of max_length in an evaluation batch, without tokens_per_batch
LITTLE = 0.02         # nats per residue; a model that gains less on the unigram hardly learned


class BoundEstimator:
    """Upper bounds on -ln p(x0) of proteins; what does not depend on the model is computed once.

    The unigram model gets the same noise: it is the control variate, see Unigram.

    counts: (n,) int64, residues that count (not X). unigram_nll: (n,) float64, -ln p in nats by the
    letter frequencies. baseline: (n,) float64: bound = baseline - mean of gains.
    """

    def __init__(self, proteins, graph, noise, letter_counts, start, samples, tokens):
        """letter_counts: of the training proteins, see Proteins.letter_counts.

        start: (n,) in [0, 1): noise level k of a protein is at the time (start + k) / samples.
        tokens: budget of a batch, padding included."""
        self.proteins = proteins
        self.graph = graph
        self.noise = noise
        self.start = start
        self.samples = samples
        self.batches = batches_within(proteins.lengths, proteins.lengths.max(initial=tokens))
        rows = [proteins[i] for i in range(len(proteins))]
        self.counts = np.array([(row != X_ID).sum() for row in rows])
        self.unigram_model = Unigram(letter_counts, graph, noise)
        nll = self.unigram_model.nll
        cost = self.unigram_model.baseline
        self.unigram_nll = np.array([nll[row].sum() for row in rows])
        self.baseline = torch.tensor([cost[row].sum() for row in rows], dtype=torch.float64)

    @torch.no_grad()
    def gains(self, model, ddp, dtype):
        """(n, samples) float64, by protein and noise level: how many nats the bound of the model is
        below that of the unigram model.

        model: without its DDP wrapper; put into eval mode and back. Each protein is computed on one
        rank. All ranks get the same result, whatever their number."""
        gains = torch.zeros(len(self.proteins), self.samples, dtype=torch.float64)
        with eval_mode(model):
            for indices in self.batches[ddp.rank::ddp.world_size]:
                x0, mask = collate(self.proteins.subset(indices))
                for k in range(self.samples):
                    batch = self._noised(x0, mask, indices, k)
                    loss = self._loss(model, batch, ddp, dtype)
                    note_progress()
                    unigram = self.unigram_model.loss(batch)
                    gains[indices, k] = (unigram - loss.double().cpu()) * (1 - TIME_EPS)
        return all_sum(gains, ddp)

    def _noised(self, x0, mask, indices, k):
        """The proteins x0, mask (B, L) with the noise of sample k: a batch of tensors by name."""
        t = (torch.from_numpy(self.start[indices]) + k) / self.samples
        sigma, dsigma = self.noise(TIME_EPS + (1 - TIME_EPS) * t)
        xt = self._corrupt(x0, sigma, indices, k)
        return {"x0": x0, "xt": xt, "mask": mask, "weight": mask & (x0 != X_ID), "sigma": sigma,
                "dsigma": dsigma}

    def _loss(self, model, batch, ddp, dtype):
        """(B,) loss of the model on a batch, in nats, on the device."""
        no_padding = bool(batch["mask"].all())
        batch = to_device(batch, ddp.device, next(model.parameters()).dtype)
        with autocast(dtype, ddp):
            log_score = model(batch["xt"], batch["sigma"], None if no_padding else batch["mask"],
                              self.graph.wanted(batch["xt"]))
        loss, _ = score_entropy_loss(log_score, batch["sigma"], batch["dsigma"], batch["xt"],
                                     batch["x0"], self.graph, batch["weight"])
        return loss

    def _corrupt(self, x0, sigma, indices, k):
        """x0 (B, L) with the noise of sample k, seeded for each protein by its key."""
        xt = x0.clone()
        for row, i in enumerate(indices.tolist()):
            n = int(self.proteins.lengths[i])
            generator = keyed_generator("validation noise", int(self.proteins.keys[i]), k)
            xt[row:row + 1, :n] = self.graph.corrupt(x0[row:row + 1, :n], sigma[row:row + 1],
                                                     generator)
        return xt


class Validation(BoundEstimator):
    """Bound on -ln p(x0) of every validation protein, the same for any number of ranks.

    The noise is seeded by the protein; the times are stratified over all proteins.
    """

    def __init__(self, proteins, config, graph, noise, letter_counts, source=None):
        """letter_counts: of the training proteins. source: the DemoSource of demo proteins, which
        knows their exact likelihood."""
        max_length = config.data.max_length
        # The same crops in every run, so that runs can be compared.
        proteins = random_crops(proteins, max_length, seed="validation", epoch=0)
        # Each protein gets its own n-th of [0, 1], in an order seeded by the keys.
        n = len(proteins)
        draws = [seed_for("validation time", int(key)) for key in proteins.keys]
        start = np.empty(n)
        start[np.argsort(draws, kind="stable")] = (np.arange(n) + 0.5) / n
        super().__init__(proteins, graph, noise, letter_counts, start,
                         config.training.eval_samples,
                         config.training.tokens_per_batch or EVAL_PROTEINS * max_length)
        self.unigram = math.exp(self.unigram_nll.sum() / self.counts.sum())
        # (n,) exact -ln p in nats, of the crops that are evaluated
        self.exact = None if source is None else source.nll(self.proteins)

    def __call__(self, model, ddp, dtype):
        """(n,) float64 bounds in nats, one per protein. model: without its DDP wrapper."""
        return self.baseline - self.gains(model, ddp, dtype).mean(1)

    def summarise(self, bound):
        """Metrics of one evaluation, from its bounds (n,), in nats per residue.

        val/unigram_standard_error is that of the mean of unigram - bound. If the exact -ln p is
        known, also val/exact, its mean, and val/exact_standard_error, that of the mean of bound -
        exact. A single protein tells no standard error."""
        n = self.counts.sum()
        nll = float(bound.sum() / n)
        values = {"val/loss": nll, "val/perplexity": math.exp(min(nll, 50.0)),
                  "val/unigram_perplexity": self.unigram}
        known = {"unigram": self.unigram_nll}
        if self.exact is not None:
            values["val/exact"] = float(self.exact.sum() / n)
            known["exact"] = self.exact
        if len(self.counts) > 1:
            for name, nats in known.items():
                error = self._standard_error(bound.numpy() - nats)
                values[f"val/{name}_standard_error"] = error
        return values

    def _standard_error(self, difference):
        """Of the mean per residue of a difference (n,) in nats: ratio estimator over proteins."""
        n = self.counts.sum()
        residual = difference - difference.sum() / n * self.counts
        return float(np.sqrt((residual**2).sum()) / n)


def evaluate(run, log, values, ddp):
    """Validate the averaged weights, add the metrics to `values`, and save the best weights.
    Without validation proteins there is nothing to do: the last weights are the result."""
    validation = run.validation
    if validation is None:
        return
    step = run.progress["step"]
    with run.ema.applied(run.bare):
        bound = validation(run.bare, ddp, run.dtype)
    values.update(validation.summarise(bound))
    score = values["val/loss"]
    if not math.isfinite(score):
        raise Diverged(f"step {step}: the validation bound is {score}; expected a finite number. "
                       f"{ADVICE}")
    log.say(f"step {step:,}: validation {score:.4f} nats per residue, perplexity "
            f"{values['val/perplexity']:.3f} (unigram {validation.unigram:.3f})")
    if record_score(run, score, values, ddp):
        save(run, log, ddp, "best.pt")


def evaluate_start(run, log, ddp):
    """Validate the initial weights of --init_from, as a baseline which training has to improve."""
    if run.init_from and not run.continued_from and run.validation is not None:
        values = {}
        evaluate(run, log, values, ddp)
        log.metrics(0, values)


def save(run, log, ddp, name, keep_last=1):
    """Write checkpoints/NAME, see training.resume.save_run; returns its path."""
    return save_run(run, log, ddp, name, keep_last, plan=run.plan.identity(),
                    letters=run.letters.tolist(), lengths=run.plan.counts.tolist(),
                    init_from=run.init_from)


def draw_lengths(counts, number, generator):
    """Random lengths (number,) int64. counts: (longest + 1,), how often each length occurs."""
    ends = np.cumsum(counts)
    drawn = torch.randint(int(ends[-1]), (number,), generator=generator).numpy()
    return np.searchsorted(ends, drawn, "right")


def sample_proteins(model, config, graph, noise,   # noqa: PLR0913  (the fields of a run)
                    counts, step, ddp, dtype):
    """FASTA text of monitoring.n_samples sampled proteins, seeded by (seed, step).

    counts: (longest + 1,) number of training proteins of each length, from which lengths are drawn.
    """
    monitoring = config.monitoring
    generator = keyed_generator(config.training.seed, "sample", step)
    lengths = draw_lengths(counts, monitoring.n_samples, generator)
    masks = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None]).to(ddp.device)

    def draw(mask):
        padding_mask = None if bool(mask.all()) else mask

        def log_score(xt, sigma):
            note_progress()
            return model(xt, sigma, padding_mask, graph.wanted(xt))

        return sample(log_score, graph, noise, tuple(mask.shape), monitoring.sample_steps,
                      forbidden=(X_ID,), mask=mask, generator=generator, device=ddp.device)

    at_a_time = max(1, SAMPLED_POSITIONS // masks.shape[1])
    with eval_mode(model), torch.no_grad(), autocast(dtype, ddp):
        out = [draw(mask) for mask in masks.split(at_a_time)]
    rows = torch.cat(out).cpu().numpy()
    return "".join(f">step_{step}_{i} length={n}\n{decode(row[:n])}\n"
                   for i, (row, n) in enumerate(zip(rows, lengths.tolist())))


def write_samples(run, ddp):
    """Sample proteins with the averaged weights, on rank 0, into samples/step_N.fasta."""
    if not ddp.is_main or not run.config.monitoring.n_samples:
        return
    step = run.progress["step"]
    with run.ema.applied(run.bare):
        text = sample_proteins(run.bare, run.config, run.graph, run.noise, run.plan.counts, step,
                               ddp, run.dtype)
    write_text_atomic(run.work_dir / "samples" / f"step_{step}.fasta", text)


def perplexity(nats):
    """exp(nats), for nats per residue, as text. exp(700) at most, as a float holds no more."""
    value = math.exp(min(nats, 700.0))
    return f"{value:.3f}" if value < 1e5 else f"{value:.3e}"


def result_lines(result, progress, folder):
    """Lines for the end of a run: a table of bounds, warnings, and where the files are."""
    best = progress["best"]   # None without validation
    last = folder / "checkpoints" / "last.pt"
    lines = []
    if "val/loss" in result:
        lines += bound_lines(result, best["score"])
    if best is None:
        lines.append(f"  weights   {last}")
    else:
        if best["step"] == 0 and "val/loss" in result:
            lines.append("  ATTENTION: no evaluation was better than that of the initial weights, "
                         "so best.pt\n    holds these")
        bound = ""
        if "val/loss" in result and best["score"] < result["val/loss"]:
            bound = f", bound {best['score']:.4f}"
        lines.append(f"  weights   {last.with_name('best.pt')} (step {best['step']:,}{bound}) and "
                     "last.pt")
    samples = folder / "samples" / f"step_{result['step']}.fasta"
    if samples.exists():   # there are none with monitoring.n_samples=0
        lines.append(f"  samples   {samples}")
    return [*lines, f"  metrics   {folder / 'metrics.jsonl'}"]


def bound_lines(result, best_bound):
    """Lines with a table of what was learned, beside what is known of the validation proteins.

    result: metrics of the last evaluation. best_bound: of all evaluations."""
    unigram = math.log(result["val/unigram_perplexity"])
    rows = [("learned bound (EMA)", result["val/loss"]), ("unigram", unigram)]
    if "val/exact" in result:
        rows.append(("exact, of the source", result["val/exact"]))
    lines = ["  the same validation proteins under   nats per residue   perplexity"]
    for name, nats in rows:
        lines.append(f"    {name:<33} {nats:>15.4f} {perplexity(nats):>12}")
    if "val/exact_standard_error" in result:
        lines.append("    (no model can be below exact; standard error of bound - exact "
                     f"{result['val/exact_standard_error']:.4f})")
    lines += attention_lines(unigram - min(result["val/loss"], best_bound),
                             result.get("val/unigram_standard_error"))
    return [in_columns(line) for line in lines]


def attention_lines(gain, error):
    """A line that warns of a bound that is hardly below the letter frequencies; none otherwise.

    gain: by how much it is, in nats per residue. error: its standard error; None: not known."""
    if gain >= max(LITTLE, error or 0.0):
        return []
    said = "no" if gain <= 0 else "hardly"
    by_how_much = f"gain {gain:.4f} nats per residue"
    if error is not None:
        by_how_much += f", its standard error {error:.4f}"
    return [f"  ATTENTION: {said} better than the letter frequencies ({by_how_much}): see 'It does "
            "not learn' in docs/troubleshooting.md"]
