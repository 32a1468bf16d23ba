# SPDX-License-Identifier: Apache-2.0
"""Contract tests for custom spaces, engines and tasks: plain functions that raise AssertionError.

    from evoalign.testing import engines, spaces, tasks

    def test_my_space():
        spaces.check_space(MySpace(config))

    def test_my_engine():
        engines.check_engine(MyEngine, config)

    def test_my_task():
        tasks.check_task(MyTask(TaskConfig(name="my_package.task:MyTask", train_data="rows.jsonl")))

Each module also lists its checks in `CHECKS`, for pytest to report one by one. They use the network only to load
the model or data of the config.
"""
