"""Instances and their packing, against exhaustive search over every legal layout."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.bundles import bundles
from slurm_migbatch.lab.papers.instances import (
    ServiceDemand,
    Undecided,
    Unservable,
    allocate,
    compose,
    fewest_slices,
    fluid,
    pack,
)
from slurm_migbatch.lab.papers.settings import InstanceSetting, best_settings, plain
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.profile import Profile
from tests.support.examples import examples
from tests.support.layouts import layouts

A100, A30 = geometry("a100-80gb"), geometry("a30")


def service(name, rate, gpu, *rates):
    """A service with these rates on a GPU's plain profiles, smallest first; 0: the latency limit is not kept."""
    profiles = sorted(plain(gpu))
    settings_of_profiles = [InstanceSetting(p, 1, 1, 1 / r) for p, r in zip(profiles, rates, strict=True) if r]
    return ServiceDemand(name, rate, tuple(settings_of_profiles))


def assert_served(gpu, found, services):
    """Every layout is legal and every service gets its rate from the instances that were placed."""
    for number in range(found.gpus):
        gpu.check(Layout(instance.slot for instance in found.placed if instance.gpu == number))
    assert {instance.gpu for instance in found.placed} <= set(range(found.gpus))
    for demand in services:
        assert sum(s.rate * n for s, n in found.of(demand.name).items()) >= demand.rate * (1 - 1e-8)


def brute(gpu, services, most=2):
    """The fewest GPUs, by trying every pair of maximal contents and every assignment of slices to services."""
    profiles = plain(gpu)
    if not services:
        return 0
    for count in range(1, most + 1):
        for contents in itertools.combinations_with_replacement(bundles(gpu, profiles), count):
            slots = [p for counts in contents for p, n in zip(profiles, counts, strict=True) for _ in range(n)]
            if serves(tuple(sorted(slots)), tuple(s.rate for s in services), services):
                return count
    return None


def serves(slots, left, services):
    """Whether slices, each assigned to one service or to none, serve the remainder of every rate."""
    if all(rate <= 1e-9 for rate in left):
        return True
    if not slots:
        return False
    head, rest = slots[0], slots[1:]
    seen = set()
    for i, demand in enumerate(services):
        rate = next((s.rate for s in demand.settings if s.profile == head), 0.0)
        if rate and left[i] > 1e-9:
            after = (*left[:i], left[i] - rate, *left[i + 1 :])
            if after not in seen and serves(rest, after, services):
                return True
            seen.add(after)
    return serves(rest, left, services)


rates = st.tuples(st.integers(0, 4), st.integers(0, 8), st.integers(1, 16)).filter(any)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), rates), min_size=1, max_size=3))
def test_allocation_needs_as_few_gpus_as_exhaustive_search(asked):
    services = [service(f"s{i}", rate, A30, *map(float, speeds)) for i, (rate, speeds) in enumerate(asked)]
    best = brute(A30, services)
    found = allocate(A30, services)
    assert found.exact
    assert found.gpus == best if best is not None else found.gpus > 2
    assert_served(A30, found, services)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 30), st.tuples(*[st.floats(0.2, 5)] * 6), st.sets(st.integers(0, 5), min_size=1)),
        min_size=1,
        max_size=6,
    )
)
def test_allocation_is_legal_serves_all_rates_and_lies_between_the_bounds(asked):
    services = [
        service(f"s{i}", rate, A100, *(speed if k in kept else 0.0 for k, speed in enumerate(speeds)))
        for i, (rate, speeds, kept) in enumerate(asked)
    ]
    found = allocate(A100, services)
    assert_served(A100, found, services)
    apart = pack(A100, {demand.name: compose(demand) for demand in services})
    assert_served(A100, apart, services)
    assert found.gpus <= apart.gpus
    assert found.gpus >= fluid(services, 7) - 1e-6


def test_instances_and_packing_are_chosen_together():
    """Each service alone is best on one 4g; two 4g need two GPUs, but a 4g and a slightly slower 3g fit on one."""
    speeds = (0.0, 0.0, 0.0, 3.0, 4.2, 4.3)  # 1g, 1g double memory, 2g, 3g, 4g, 7g
    services = [service(name, 3.0, A100, *speeds) for name in "ab"]
    greedy = [ServiceDemand(s.name, s.rate, tuple(x for x in s.settings if x.profile.compute == 4)) for s in services]
    assert pack(A100, {s.name: compose(s) for s in greedy}).gpus == 2
    found = allocate(A100, services)
    assert found.gpus == 1
    assert found.slices in (6, 7)
    assert_served(A100, found, services)


def test_fewer_compute_slices_are_chosen_among_equal_gpu_counts():
    demand = service("a", 1.0, A100, 1.0, 1.0, 2.0, 3.0, 4.0, 7.0)
    found = allocate(A100, [demand])
    assert (found.gpus, found.slices) == (1, 1)


def test_hoped_for_rates_are_tried_only_where_they_cost_no_extra_gpu():
    small = Profile.parse("1g.10gb")
    sure, bold = InstanceSetting(small, 8, 1, 1.0), InstanceSetting(small, 16, 1, 2.0)
    assert sure.rate == bold.rate
    a = ServiceDemand("a", 16.0, (sure, bold), {sure: 8.0, bold: 12.0})
    assert allocate(A100, [a]).of("a") == {bold: 2}
    full = ServiceDemand(
        "a", 56.0, (sure, InstanceSetting(small, 16, 1, 2.1)), {InstanceSetting(small, 16, 1, 2.1): 12.0}
    )
    found = allocate(A100, [full])
    assert found.gpus == 1
    assert found.of("a") == {sure: 7}


def test_compose_uses_the_best_profile_and_the_smallest_for_the_remainder():
    demand = service("a", 10.5, A100, 1.0, 1.0, 2.6, 3.3, 4.5, 7.0)
    counts = {setting.profile.name: n for setting, n in compose(demand).items()}
    assert counts == {"2g.20gb": 4, "1g.10gb": 1}
    assert {s.profile.name: n for s, n in compose(service("a", 11.5, A100, 1.0, 1.0, 2.6, 3.3, 4.5, 7.0)).items()} == {
        "2g.20gb": 5
    }


def test_service_that_no_profile_can_serve_is_named_in_the_error():
    for solve in (lambda s: allocate(A100, [s]), compose, lambda s: fluid([s], 7)):
        with pytest.raises(Unservable, match="bert: no slice keeps the latency limit"):
            solve(ServiceDemand("bert", 1.0, tuple(best_settings([]).values())))


def test_timeout_raises_an_error():
    demand = service("a", 15.0, A100, 1.0, 1.0, 2.0, 3.0, 4.0, 7.0)
    with pytest.raises(Undecided, match="no allocation was found within"):
        allocate(A100, [demand, service("b", 9.5, A100, 1.0, 1.0, 2.1, 3.2, 4.1, 6.0)], time_limit_s=0.0)


def test_no_services_need_no_gpus():
    assert allocate(A100, []).gpus == 0
    assert pack(A100, {}).gpus == 0


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from((1, 2, 3, 4, 7))), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_fewest_slices_matches_exhaustive_search(kinds, wanted):
    found = fewest_slices([float(rate) for rate, _ in kinds], [size for _, size in kinds], float(wanted))
    total = sum(n * kinds[i][1] for i, n in found.items())
    assert sum(n * kinds[i][0] for i, n in found.items()) >= wanted
    reach = [0] * (total + 1)
    for n in range(1, total + 1):
        reach[n] = max([reach[n - 1], *(reach[n - size] + rate for rate, size in kinds if size <= n)])
    assert reach[total] >= wanted
    assert total == 0 or reach[total - 1] < wanted


def test_every_bundle_of_profiles_is_a_legal_layout():
    found = {tuple(sorted(layout.profiles)) for layout in layouts(A30)}
    for counts in bundles(A30, plain(A30)):
        assert tuple(sorted(p for p, n in zip(plain(A30), counts, strict=True) for _ in range(n))) in found


def test_best_setting_of_a_profile_is_the_fastest_within_the_limit():
    small, large = Profile.parse("1g.5gb"), Profile.parse("7g.40gb")
    cells = {(small, 1, 1): 0.01, (small, 8, 1): 0.04, (small, 8, 2): 0.08, (large, 8, 1): 0.02}
    found = [InstanceSetting(*cell, seconds) for cell, seconds in cells.items()]
    assert best_settings(found) == {
        small: InstanceSetting(small, 8, 1, 0.04),  # two processes are no faster, so one
        large: InstanceSetting(large, 8, 1, 0.02),
    }
    assert best_settings(found, 0.015) == {small: InstanceSetting(small, 1, 1, 0.01)}
