"""What has to hold of the scaled stream: its epochs, and what a group of ordered readers got. Pure."""

from __future__ import annotations

from examples.flights.findings import Check, Findings, few


def check_epochs(found: Findings) -> Check:
    """Scaled while the transaction was open, which then committed in a copy of the layout that it wrote by."""
    requested = found.outcome["requested"]
    epochs = found.epochs
    differences = []
    made = [epoch for epoch in epochs[1:] if epoch.reference == epoch.epoch]
    if [epoch.segments for epoch in made] != list(found.scaled):
        differences.append(
            f"the history has scalings to {[epoch.segments for epoch in made]} segments, "
            f"not to {list(found.scaled)}"
        )
    differences += [
        f"scaled to {segments} only {at - requested:.1f} s after the commit was asked for"
        for segments, at in zip(found.scaled, found.scaled_at, strict=True)
        if at >= requested
    ]
    if [epoch.epoch for epoch in epochs] != list(range(len(epochs))):
        differences.append("the epochs do not follow each other")
    took = [at for at, epoch in enumerate(epochs) if epoch.big]
    if len(took) != 1:
        differences.append(f"the transaction was committed in {len(took)} epochs")
    for at in took:
        epoch, after = epochs[at], epochs[at + 1 : at + 2]
        first = epochs[0]
        if epoch.reference != first.epoch or epoch.segments != first.segments or not at:
            differences.append(
                f"epoch {epoch.epoch}, which took it, does not duplicate the first one"
            )
        last = made[-1].epoch if made else first.epoch
        if [each.reference for each in after] != [last]:
            differences.append(f"the epoch after it does not duplicate epoch {last}")
    return Check(
        f"{found.transactions_stream}, scaled while the transaction was open: its epochs",
        "; ".join(map(str, epochs)),
        tuple(differences),
    )


def check_in_order(found: Findings) -> Check:
    """A group of readers got each plane's events in the order of the source and of the commits, and all."""
    ordered = found.ordered
    differences = list(ordered.differences)
    more = ordered.difference_count - len(differences)
    if more > 0:
        differences.append(f"and {more:,} more")
    if ordered.rows != ordered.expected and not differences:
        differences.append(f"{ordered.rows:,} of {ordered.expected:,} rows came")
    report = next(r for r in found.streams if r.stream == found.transactions_stream)
    smalls = {number: count for number, (count, _) in report.smalls.items()}
    if dict(ordered.smalls) != smalls:
        wrong = sorted(set(smalls.items()) ^ set(ordered.smalls))
        differences += few(f"small transaction {n}: {count} events" for n, count in wrong)
    if not ordered.moved:
        differences.append("no key had events in several segments: nothing was shown")
    return Check(
        f"A group of readers of {found.transactions_stream}, in order across all epochs",
        f"{ordered.rows:,} rows of {ordered.keys:,} planes and {len(ordered.smalls):,} small transactions, "
        f"each plane's in order; {ordered.moved:,} planes in several segments, {ordered.shared:,} read by "
        f"both members; {ordered.repeated:,} events came again",
        tuple(differences),
    )
