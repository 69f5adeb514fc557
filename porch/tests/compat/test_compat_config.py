import json

import jax
import pytest

import tailrace as tr
from tailrace.compat import ipu
from tailrace.compat.ipu import config, utils
from tailrace.compat.ipu.config import IPUConfig, SelectionOrder
from tailrace.devices import devices


def test_options_are_typed_and_nested():
    cfg = IPUConfig()
    cfg.io_tiles.num_io_tiles = 8
    assert cfg.io_tiles.num_io_tiles == 8
    assert cfg.auto_select_ipus == []
    assert cfg.selection_order is SelectionOrder.AUTO
    assert cfg.norms.experimental.distributed_batch_norm_replica_group_size == 1
    assert "io_tiles.num_io_tiles = 8" in str(cfg)


def test_two_configurations_share_nothing():
    IPUConfig().compilation_poplar_options["a"] = "b"
    assert IPUConfig().compilation_poplar_options == {}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("auto_select_ipu", "auto_select_ipus"), ("allow_recomputed", "allow_recompute")],
)
def test_an_unknown_option_gets_a_hint(name, hint):
    with pytest.raises(ValueError, match=f"Did you mean '{hint}'"):
        setattr(IPUConfig(), name, 1)
    with pytest.raises(tr.TailraceError, match="is not a valid option"):
        getattr(IPUConfig(), name)


@pytest.mark.parametrize("value", [True, "2", 1.0, None])
def test_a_wrong_type_is_refused(value):
    message = "Trying to set auto_select_ipus to .*, but it must be of type"
    with pytest.raises(TypeError, match=message):
        IPUConfig().auto_select_ipus = value


def test_a_category_cannot_be_assigned_to():
    with pytest.raises(Exception, match="io_tiles is a category and cannot be assigned to"):
        IPUConfig().io_tiles = 3


def test_to_dict_and_back():
    cfg = IPUConfig()
    cfg.auto_select_ipus = [1, 2]
    cfg.selection_order = SelectionOrder.HOOF
    cfg.io_tiles.num_io_tiles = 4
    cfg.compilation_poplar_options = {"a": "b"}
    assert cfg.to_dict()["selection_order"] == 3
    assert json.loads(cfg.to_json()) == cfg.to_dict()
    for again in (IPUConfig.from_dict(cfg.to_dict()), IPUConfig().from_json(cfg.to_json())):
        assert again.to_dict() == cfg.to_dict()
        assert again.selection_order is SelectionOrder.HOOF
    with pytest.raises(ValueError, match="Did you mean"):
        IPUConfig.from_dict({"auto_select_ipu": 2})


def test_metadata():
    found = IPUConfig().get_attribute_metadata("io_tiles.num_io_tiles")
    assert found.type is int
    assert found.default == 0
    assert not found.deprecated
    assert found.doc
    assert IPUConfig().get_attribute_metadata("optimizations.enable_fast_math").deprecated
    with pytest.raises(ValueError, match="Could not get attribute metadata for 'nothing'"):
        IPUConfig().get_attribute_metadata("nothing")


# -- configuring ----------------------------------------------------------------------------------


def configured(**options):
    cfg = IPUConfig()
    for name, value in options.items():
        setattr(cfg, name, value)
    cfg.configure_ipu_system()
    return cfg


def test_devices_are_taken_again_and_again():
    everything = jax.devices()
    for count in (1, 2, 8, 4):
        configured(auto_select_ipus=count)
        assert devices.available() == everything[:count]
    config.reset_ipu_configuration()
    config.reset_ipu_configuration()
    assert devices.available() == everything


def test_nothing_happens_before_configuring():
    cfg = IPUConfig()
    cfg.auto_select_ipus = 2
    assert len(devices.available()) == 8
    with pytest.raises(RuntimeError, match="No IPU devices configured"):
        config.get_ipu_config()
    cfg.configure_ipu_system()
    assert config.get_ipu_config()[0].auto_select_ipus == 2


def test_a_default_configuration_has_one_device():
    configured()
    assert len(devices.available()) == 1


def test_several_logical_devices():
    configured(auto_select_ipus=[1, 2])
    assert config.group(0) == jax.devices()[:1]
    assert config.group(1) == jax.devices()[1:3]
    with pytest.raises(tr.DeviceError, match="Device ordinal 2 was asked for, and 2 logical"):
        config.group(2)


def test_chosen_devices():
    configured(select_ipus=[3, 1])
    assert config.group(0) == [jax.devices()[3]]
    assert config.group(1) == [jax.devices()[1]]


@pytest.mark.parametrize(
    ("order", "numbers"),
    [
        (SelectionOrder.ZIGZAG, [0, 1, 2, 3, 4, 5, 6, 7]),
        (SelectionOrder.SNAKE, [0, 1, 3, 2, 4, 5, 7, 6]),
        (SelectionOrder.HOOF, [0, 2, 4, 6, 7, 5, 3, 1]),
    ],
)
def test_selection_orders(order, numbers):
    configured(auto_select_ipus=8, selection_order=order)
    assert [device.id for device in devices.available()] == numbers
    assert utils.SelectionOrder is SelectionOrder


def test_rules():
    with pytest.raises(Exception, match="Only one of auto_select_ipus and select_ipus can be set"):
        configured(auto_select_ipus=2, select_ipus=[1])
    with pytest.raises(ValueError, match="names a device twice"):
        configured(select_ipus=[1, 1])
    with pytest.raises(tr.DeviceError, match="asks for 9 devices, and there are 8"):
        configured(auto_select_ipus=9)
    with pytest.raises(tr.DeviceError, match="not there"):
        configured(select_ipus=[8])
    cfg = IPUConfig()
    cfg.io_tiles.place_ops_on_io_tiles = True
    with pytest.raises(ValueError, match="Cannot place ops on I/O tiles"):
        cfg.configure_ipu_system()
    cfg = IPUConfig()
    cfg.experimental.multi_replica_distribution.process_count = 2
    cfg.experimental.multi_replica_distribution.process_index = 2
    with pytest.raises(ValueError, match=r"index must be in \[0, 2\)"):
        cfg.configure_ipu_system()


def test_configuring_otherwise_may_be_forbidden():
    first = configured(auto_select_ipus=1)
    config.configure_ipu_system(first, reset_configuration=False)
    other = IPUConfig()
    other.auto_select_ipus = 2
    with pytest.raises(ipu.errors.FailedPreconditionError, match="previously configured"):
        config.configure_ipu_system(other, reset_configuration=False)


def test_what_was_about_the_chip_is_noted_once(caplog):
    cfg = IPUConfig()
    cfg.floating_point_behaviour.esr = config.StochasticRoundingBehaviour.ON
    cfg.configure_ipu_system()
    cfg.configure_ipu_system()
    said = [
        record.message for record in caplog.records if "about the original chip" in record.message
    ]
    assert len(said) == 1
    assert "floating_point_behaviour.esr" in said[0]


def test_replicas_follow_from_devices_and_shards():
    configured(auto_select_ipus=8)
    assert [config.replicas(shards) for shards in (1, 2, 4, 8)] == [8, 4, 2, 1]
    configured(auto_select_ipus=6)
    with pytest.raises(
        ipu.errors.InternalError,
        match="with 6 IPUs and 4 shards. The number of shards needs to divide the number of IPUs",
    ):
        config.replicas(config.shards_of(2))


def test_the_older_way_is_refused():
    with pytest.raises(RuntimeError, match="removed from the original"):
        utils.create_ipu_config()
