"""Counts belong to one merge: none is shared with another."""

from __future__ import annotations

import concurrent.futures

from mergekit.graph import Executor
from mergekit.merge_methods import merge_state_dicts

from support.commands import merge, merge_in_memory, plan_recipe
from support.expected import STRONG, Plan, check, expect, plan
from support.recipes import Models


def recipes_of_pairs(models: Models) -> list[tuple[dict, Plan]]:
    """Merges of the same base and overlapping choices of agents, whose ratios all differ."""
    chosen = [(0, 1), (1, 2), (0, 2), (0, 1, 2), (2, 1, 0)]
    found = []
    for agents in chosen:
        recipe = models.recipe("ramplus", parameters=STRONG)
        recipe["models"] = [{"model": models.agent_paths[i]} for i in agents]
        planned = plan(models.base, [models.agents[i] for i in agents], STRONG)
        found.append((recipe, planned))
    return found


def test_merges_one_after_another_share_no_counts(make_models, tmp_path):
    for i, (recipe, planned) in enumerate(recipes_of_pairs(make_models())):
        directory = tmp_path / str(i)
        directory.mkdir()
        check(merge(recipe, directory), expect("ramplus", planned))


def test_planning_two_merges_before_running_either_shares_no_counts(make_models):
    work = recipes_of_pairs(make_models())
    tasks = [plan_recipe(recipe).plan_in_memory() for recipe, _ in work]
    for planned_tasks, (_, planned) in reversed(list(zip(tasks, work, strict=True))):
        results = Executor(planned_tasks).run(quiet=True)
        output = {task.weight_info.name: tensor for task, tensor in results}
        check(output, expect("ramplus", planned))


def test_plan_can_be_run_again(make_models):
    (recipe, planned), *_ = recipes_of_pairs(make_models())
    tasks = plan_recipe(recipe).plan_in_memory()
    expected = expect("ramplus", planned)
    for _ in range(2):
        results = Executor(tasks).run(quiet=True)
        check({task.weight_info.name: tensor for task, tensor in results}, expected)


def test_merges_in_threads_share_no_counts(make_models):
    work = recipes_of_pairs(make_models()) * 3
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(merge_in_memory, [recipe for recipe, _ in work]))
    for output, (_, planned) in zip(outputs, work, strict=True):
        check(output, expect("ramplus", planned))


def test_merge_state_dicts_in_threads_share_no_counts(make_models):
    work = recipes_of_pairs(make_models())
    groups = [
        [
            {name: planned[name].base for name in planned},
            *(
                {name: planned[name].agents[i] for name in planned}
                for i in range(len(recipe["models"]))
            ),
        ]
        for recipe, planned in work
    ]

    def run(models):
        return merge_state_dicts(models, "ramplus", base=0, parameters=STRONG)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        outputs = list(pool.map(run, groups))
    for output, (_, planned) in zip(outputs, work, strict=True):
        check(output, expect("ramplus", planned))
