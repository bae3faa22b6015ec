"""Alarms: the promised false-alarm rate, and metrics as other libraries compute them."""

import math

import numpy as np
import pytest

from genrl.envs.alarms import conformal_threshold, detection_metrics, first_alarm, leave_one_out_thresholds


@pytest.mark.parametrize("m", [19, 30, 60])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
@pytest.mark.parametrize("ties", [False, True])
def test_successful_episodes_raise_no_more_false_alarms_than_promised(m, alpha, ties):
    rng = np.random.default_rng(m)
    rounds, false = 3000, 0
    for _ in range(rounds):
        scores = rng.exponential(size=m + 1) ** 2
        scores = np.round(scores, 0) if ties else scores
        false += scores[-1] > conformal_threshold(scores[:-1], alpha)
    error = 2 * math.sqrt(alpha * (1 - alpha) / rounds)
    assert false / rounds <= alpha + error
    if not ties:  # and the threshold is no higher than it must be
        assert false / rounds >= alpha - 1 / (m + 1) - error


def test_the_threshold_is_an_order_statistic_and_infinite_for_too_few_episodes():
    scores = list(range(19))
    assert conformal_threshold(scores, 0.05) == 18  # ceil(20 * 0.95) = 19th smallest
    assert conformal_threshold(scores, 0.10) == 17
    assert conformal_threshold(scores[:18], 0.05) == math.inf
    assert conformal_threshold([], 0.05) == math.inf
    assert conformal_threshold(scores, 0.05, rule="quantile") == pytest.approx(np.quantile(scores, 0.95))
    with pytest.raises(ValueError, match="NaN"):
        conformal_threshold([1.0, math.nan])
    with pytest.raises(ValueError, match="alpha"):
        conformal_threshold(scores, 0.0)
    with pytest.raises(ValueError, match="'order' and 'quantile'"):
        conformal_threshold(scores, 0.1, rule="max")


def test_no_episode_judges_itself():
    scores, success = [5.0, 1.0, 2.0, 9.0], [True, True, True, False]
    thresholds = leave_one_out_thresholds(scores, success, alpha=0.34)
    # two others: the ceil(3 * 0.66) = 2nd smallest, the larger; for the failure all three: ceil(4 * 0.66) = 3rd
    assert thresholds == [2.0, 5.0, 5.0, 5.0]
    assert first_alarm([5.0], thresholds[0]) == 0 and first_alarm([1.0], thresholds[1]) is None


def test_an_alarm_is_the_first_score_strictly_above_the_threshold():
    assert first_alarm([0.0, 1.0, 1.5, 0.2], 1.0) == 2
    assert first_alarm([0.0, 0.0], 0.0) is None
    assert first_alarm([], 1.0) is None
    assert first_alarm([1e9], math.inf) is None


def test_detection_metrics_equal_scikit_learns():
    from sklearn import metrics

    rng = np.random.default_rng(0)
    failed = rng.random(60) < 0.4
    scores = np.round(rng.normal(size=60) + failed, 1)  # with ties
    times = [float(i) if score > 0.8 else None for i, score in enumerate(scores)]
    found = detection_metrics(scores, times, failed)
    alarm = scores > 0.8
    assert found.tpr == pytest.approx(metrics.recall_score(failed, alarm))
    assert found.tnr == pytest.approx(metrics.recall_score(~failed, ~alarm))
    assert found.accuracy == pytest.approx(metrics.accuracy_score(failed, alarm))
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(failed, alarm))
    assert found.f1 == pytest.approx(metrics.f1_score(failed, alarm))
    assert found.auroc == pytest.approx(metrics.roc_auc_score(failed, scores))
    assert found.detection_time == pytest.approx(np.flatnonzero(failed & alarm).mean())
    assert (found.failures, found.successes) == (failed.sum(), (~failed).sum())


def test_what_cannot_be_measured_is_not_a_number():
    found = detection_metrics([1.0, 2.0], [None, 3.0], [False, False])
    assert math.isnan(found.tpr) and math.isnan(found.auroc) and math.isnan(found.detection_time)
    assert found.tnr == 0.5 and found.to_dict()["auroc"] is None and found.to_dict()["tnr"] == 0.5
    with pytest.raises(ValueError, match="each episode"):
        detection_metrics([1.0], [], [True])
