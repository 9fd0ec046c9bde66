"""Figures of the loop: the scheduler's and the executor's, sent in one message and shown to whoever scrapes."""

from __future__ import annotations

from types import SimpleNamespace

from drivetrain.server.loop_process import stats_of
from drivetrain.server.messages import Stats
from drivetrain.server.metrics import Metrics

FIGURES = {
    "graphs_captured": 9,
    "graphs_wanted": 41,
    "graphs_given_up": 32,
    "graphs_planned_bytes": 563,
    "graphs_measured_bytes": 470,
    "memory_retries": 2,
    "memory_least_free_bytes": 77,
    "memory_given_back_bytes": 64,
}


def test_the_executors_figures_are_sent_with_the_schedulers() -> None:
    loop = SimpleNamespace(stats=lambda: SimpleNamespace(waiting=3), steps=5, figures=lambda: FIGURES)
    assert stats_of(loop) == Stats(waiting=3, steps=5, **FIGURES)
    assert stats_of(SimpleNamespace(stats=lambda: SimpleNamespace(waiting=3))) == Stats(waiting=3)


def test_they_are_metrics() -> None:
    metrics = Metrics()
    metrics.take_stats(Stats(**FIGURES))
    shown = metrics.render().decode()
    for line in (
        'loop_graphs{what="captured"} 9.0',
        'loop_graphs{what="wanted"} 41.0',
        'loop_graphs{what="given_up"} 32.0',
        'loop_graph_bytes{what="planned"} 563.0',
        'loop_graph_bytes{what="measured"} 470.0',
        "loop_memory_retries 2.0",
        "loop_memory_least_free_bytes 77.0",
        "loop_memory_given_back_bytes 64.0",
    ):
        assert f"drivetrain_{line}" in shown
    metrics.take_stats(Stats())
    assert "drivetrain_loop_memory_least_free_bytes NaN" in metrics.render().decode()
