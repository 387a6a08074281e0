#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/state.pb.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/state_directory.h"
#include "recovery/coordinator/state_records.h"
#include "src/base/failpoint.h"
#include "src/base/version.h"
#include "tests/support/durable_core.h"
#include "tests/support/numbered_digest.h"
#include "tests/support/process.h"

namespace rekindle::coordinator {
namespace {

using ::testing::HasSubstr;

std::vector<RecordWrite> put(const std::string& key, const std::string& value) {
  return {{key, value}};
}
StateChange sample(std::uint64_t epoch) {
  StateChange change;
  change.epoch = epoch;
  change.versions[{"qwen3", 41}] = DurableVersion{{1, 2}, {3, 4}, 1000, false};
  change.versions[{"qwen3", 42}] = DurableVersion{{5, 6}, {7, 8}, 2000, true};
  // None, though others have some.
  change.versions[{"qwen3", 43}] = DurableVersion{{5, 9}, {7, 8}, 2000, false, 0};
  change.versions[{"a-b.c", 44}] = DurableVersion{{5, 10}, {7, 8}, 2000, false, 3, true};
  change.retired_through["qwen3"] = 17;
  change.drained["a"] = true;
  change.drained["b"] = true;
  return change;
}
DurableState state_of(const StateChange& change) {
  DurableState state;
  change.apply_to(state);
  return state;
}
Records records_of(const std::vector<RecordWrite>& writes) {
  Records records;
  for (const RecordWrite& write : writes) records[write.key] = *write.value;
  return records;
}
StateRecords parsed(const Records& records) {
  auto result = StateRecords::parse(records);
  EXPECT_TRUE(result) << result.error().message();
  return *std::move(result);
}

TEST(CoordinatorRecords, WhatIsEncodedIsParsed) {
  const Records records = records_of(parsed({}).encode(sample(3)));
  const StateRecords all = parsed(records);
  EXPECT_EQ(all.state(), state_of(sample(3)));
  StateChange less;
  less.versions[{"qwen3", 41}] = std::nullopt;
  less.drained["a"] = false;
  for (const RecordWrite& write : all.encode(less)) EXPECT_FALSE(write.value) << write.key;
}

TEST(CoordinatorRecords, ADamagedRecordIsNamed) {
  Records records = records_of(parsed({}).encode(sample(3)));
  const std::string key = "versions/qwen3@00000000000000000042";
  ASSERT_TRUE(records.contains(key));
  records[key] = "\xff\xff";
  auto damaged = StateRecords::parse(records);
  ASSERT_FALSE(damaged);
  EXPECT_EQ(damaged.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(damaged.error().message(), HasSubstr(key));
  records[key] = records["versions/qwen3@00000000000000000041"];
  EXPECT_EQ(StateRecords::parse(records).error().code(), ErrorCode::kCorrupt);
}

TEST(CoordinatorRecords, ARootThatIsNoDigestIsDamage) {
  Records records = records_of(parsed({}).encode(sample(3)));
  const std::string key = "versions/qwen3@00000000000000000042";
  for (const std::size_t size : {0u, 16u, 31u, 33u}) {
    proto::VersionRecord record;
    ASSERT_TRUE(record.ParseFromString(records[key]));
    record.mutable_root()->set_value(std::string(size, 'r'));
    Records damaged = records;
    damaged[key] = record.SerializeAsString();
    const auto refused = StateRecords::parse(damaged);
    ASSERT_FALSE(refused) << size;
    EXPECT_EQ(refused.error().code(), ErrorCode::kCorrupt);
    EXPECT_THAT(refused.error().message(), HasSubstr(key));
  }
}

// A field with a number that no message here uses.
std::string unknown_field(const std::string& value) {
  std::string bytes("\xfa\x3f", 2);  // field 1023, length-delimited
  bytes += static_cast<char>(value.size());
  return bytes + value;
}

TEST(CoordinatorRecords, C3FieldsAndRecordsOfANewerWriterSurviveWhatAnOlderOneWrites) {
  const StateChange before = sample(3);
  Records records = records_of(parsed({}).encode(before));
  for (auto& [key, value] : records) value += unknown_field("new in " + key);
  // Nested, too: the version's id.
  proto::VersionRecord nested;
  ASSERT_TRUE(nested.ParseFromString(records["versions/qwen3@00000000000000000041"]));
  proto::ModelVersion id;
  ASSERT_TRUE(id.ParseFromString(nested.id().SerializeAsString() + unknown_field("nested")));
  *nested.mutable_id() = id;
  records["versions/qwen3@00000000000000000041"] = nested.SerializeAsString();
  records["shards/x"] = "of a newer writer";

  StateRecords older = parsed(records);
  EXPECT_EQ(older.state(), state_of(before));
  StateChange change = before;  // every record is written anew
  change.epoch = 4;
  change.versions[{"qwen3", 41}]->retiring = true;
  change.retired_through["qwen3"] = 18;
  change.drained["a"] = false;
  const auto writes = older.encode(change);
  older.note(writes);
  for (const RecordWrite& write : writes) {
    ASSERT_TRUE(write.value) << write.key;
    EXPECT_THAT(*write.value, HasSubstr("new in " + write.key));
    EXPECT_NE(write.key, "shards/x");
  }
  for (const RecordWrite& write : writes) records[write.key] = *write.value;
  EXPECT_THAT(records["versions/qwen3@00000000000000000041"], HasSubstr("nested"));
  EXPECT_EQ(parsed(records).state(), [&] {
    DurableState state = state_of(before);
    change.apply_to(state);
    return state;
  }());
}

TEST(CoordinatorRecords, C3AStateThatNeedsANewerWriterIsRefused) {
  proto::StateMeta meta;
  meta.set_epoch(7);
  meta.set_min_writer(kStateWriter + 1);
  const auto refused = StateRecords::parse({{"meta", meta.SerializeAsString()}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(refused.error().message(), HasSubstr("start a newer release"));
  meta.set_written_by("rekindle 9.8.7");
  EXPECT_THAT(StateRecords::parse({{"meta", meta.SerializeAsString()}}).error().message(),
              ::testing::AllOf(HasSubstr("was written by rekindle 9.8.7"),
                               HasSubstr("start rekindle 9.8.7, or one as new")));
  meta.set_min_writer(kStateWriter);
  EXPECT_EQ(parsed({{"meta", meta.SerializeAsString()}}).state().epoch, 7u);
}

TEST(CoordinatorRecords, AStateNamesTheReleaseThatLedLast) {
  proto::StateMeta meta;
  meta.set_written_by("rekindle 9.8.7");
  StateChange change;
  change.epoch = 4;
  const auto writes = parsed({{"meta", meta.SerializeAsString()}}).encode(change);
  ASSERT_TRUE(meta.ParseFromString(*writes.front().value));
  EXPECT_EQ(meta.written_by(), software_version());
}

TEST(CoordinatorState, WhatWasWrittenIsLoaded) {
  const rekindle::testing::TempDir temp;
  {
    auto directory = StateDirectory::open(temp / "state");
    ASSERT_TRUE(directory) << directory.error().message();
    EXPECT_EQ(*directory->load(), Records{}) << "nothing yet";
    ASSERT_TRUE(directory->write(put("a", "1")));
    ASSERT_TRUE(directory->write({{"b", "2"}, {"c", std::string(5000, '\0')}}));
    ASSERT_TRUE(directory->write({{"a", std::nullopt}, {"b", "3"}}));
  }
  auto again = StateDirectory::open(temp / "state");
  const Records expected{{"b", "3"}, {"c", std::string(5000, '\0')}};
  EXPECT_EQ(*again->load(), expected);
  ASSERT_TRUE(again->write(put("d", "4")));
  Records more = expected;
  more["d"] = "4";
  EXPECT_EQ(*again->load(), more) << "a new log begins with all that was there";
}

TEST(CoordinatorState, TheDirectoryIsOursAlone) {
  const rekindle::testing::TempDir temp;
  const auto path = temp / "state";
  {
    auto first = StateDirectory::open(path);
    ASSERT_TRUE(first);
    const auto mode = std::filesystem::status(path).permissions();
    EXPECT_EQ(mode, std::filesystem::perms::owner_all);
    auto second = StateDirectory::open(path);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code(), ErrorCode::kUnavailable);
    EXPECT_THAT(second.error().message(), HasSubstr(fmt::format("pid {}", ::getpid())));
    EXPECT_THAT(second.error().message(), HasSubstr(path.string()));
  }
  EXPECT_TRUE(StateDirectory::open(path)) << "released";
}

std::string log_of(const std::vector<std::vector<RecordWrite>>& writes) {
  std::string log;
  for (std::size_t i = 0; i < writes.size(); ++i) log += encode_frame(i + 1, writes[i]);
  return log;
}

TEST(CoordinatorState, EveryDamagedByteIsNoticed) {
  const std::string bytes = log_of({put("a", "first"), put("b", "second"), put("c", "third")});
  ASSERT_EQ(decode_log(bytes)->size(), 3u);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (const int bit : {0, 7}) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      const auto decoded = decode_log(damaged);
      ASSERT_FALSE(decoded) << "byte " << i;
    }
  }
}

TEST(CoordinatorState, ATornTailIsLeftOutAndACutSnapshotIsDamage) {
  const std::string first = log_of({put("a", "first")});
  const std::string two = log_of({put("a", "first"), put("b", "second")});
  const std::string bytes =
      log_of({put("a", "first"), put("b", "second"), put("c", std::string(3000, 'x'))});
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    std::optional<std::size_t> torn_at;
    const auto cut = decode_log(bytes.substr(0, size), &torn_at);
    if (size < first.size()) {
      ASSERT_FALSE(cut) << "cut to " << size;
      continue;
    }
    ASSERT_TRUE(cut) << "cut to " << size << ": " << cut.error().message();
    EXPECT_EQ(cut->size(), size < two.size() ? 1u : 2u) << size;
    EXPECT_EQ(torn_at.has_value(), size != first.size() && size != two.size()) << size;
  }
  // The size became durable, sectors of the bytes did not.
  std::string zeros = bytes;
  std::fill(zeros.begin() + static_cast<std::ptrdiff_t>(two.size()), zeros.end(), '\0');
  EXPECT_EQ(decode_log(zeros)->size(), 2u);
  zeros = bytes;
  std::fill_n(zeros.begin() + static_cast<std::ptrdiff_t>(two.size()) + 600, 512, '\0');
  EXPECT_EQ(decode_log(zeros)->size(), 2u);
  // The same in the middle is damage: what followed was acknowledged.
  zeros = bytes + encode_frame(4, put("d", "fourth"));
  std::fill_n(zeros.begin() + static_cast<std::ptrdiff_t>(two.size()) + 600, 512, '\0');
  EXPECT_EQ(decode_log(zeros).error().code(), ErrorCode::kCorrupt);
}

// Wherever the header of the last frame lies in its sector, or over two of them.
TEST(CoordinatorState, AHeaderInASectorThatWasNotWrittenIsATornTail) {
  constexpr std::size_t kSector = 512;
  for (std::size_t padding = 0; padding < kSector; ++padding) {
    const std::string before = log_of({put("a", "first"), put("b", std::string(padding, 'y'))});
    const std::string last = encode_frame(3, put("c", std::string(3000, 'x')));
    const std::string after = encode_frame(4, put("d", "fourth"));
    const std::size_t sector = before.size() / kSector * kSector;
    for (const std::size_t lost : {sector, sector + kSector}) {
      std::string bytes = before + last;
      const std::size_t begin = std::max(lost, before.size());
      std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                bytes.begin() + static_cast<std::ptrdiff_t>(lost + kSector), '\0');
      std::optional<std::size_t> torn_at;
      const auto decoded = decode_log(bytes, &torn_at);
      ASSERT_TRUE(decoded) << padding << ": " << decoded.error().message();
      EXPECT_EQ(decoded->size(), 2u);
      EXPECT_EQ(torn_at, before.size());
      EXPECT_EQ(decode_log(bytes + after).error().code(), ErrorCode::kCorrupt)
          << padding << ": what followed was acknowledged";
    }
  }
}

TEST(CoordinatorState, ADamagedFileIsAnErrorThatNamesItAndIsLeftAlone) {
  const rekindle::testing::TempDir temp;
  auto directory = StateDirectory::open(temp.path());
  ASSERT_TRUE(directory->write(put("a", "1")));
  rekindle::testing::write_file(temp / "state", "not a state");
  const auto state = directory->load();
  ASSERT_FALSE(state);
  EXPECT_EQ(state.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(state.error().message(), HasSubstr((temp / "state").string()));
  EXPECT_EQ(rekindle::testing::read_file(temp / "state"), "not a state");
}

TEST(CoordinatorState, AStateOfAnotherFormatIsNoDamageAndIsLeftAlone) {
  const rekindle::testing::TempDir temp;
  auto directory = StateDirectory::open(temp.path());
  for (const auto& [bytes, format] : {std::pair{"RKSTATE1 and so on", "earlier format 1"},
                                      {"RKSTATE3 and so on", "newer format 3"}}) {
    rekindle::testing::write_file(temp / "state", bytes);
    const auto state = directory->load();
    ASSERT_FALSE(state);
    EXPECT_EQ(state.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(state.error().message(),
                ::testing::AllOf(HasSubstr((temp / "state").string()), HasSubstr(format),
                                 HasSubstr("start the release that wrote it")));
    EXPECT_EQ(rekindle::testing::read_file(temp / "state"), bytes);
  }
}

constexpr const char* kSteps[] = {"coordinator.state.half_written", "coordinator.state.before_sync",
                                  "coordinator.state.before_rename",
                                  "coordinator.state.before_directory_sync",
                                  "coordinator.state.saved"};

TEST(CoordinatorState, AnErrorAtAnyStepLeavesTheOldOrTheNewState) {
  for (const char* step : kSteps) {
    for (const bool of_a_new_log : {false, true}) {
      const rekindle::testing::TempDir temp;
      auto directory = StateDirectory::open(temp.path());
      ASSERT_TRUE(directory->write(put("a", "3")));
      if (of_a_new_log) {
        directory = fail(ErrorCode::kUnavailable, "none");  // gives the lock back
        directory = StateDirectory::open(temp.path());
        ASSERT_TRUE(directory->load());
      }
      ASSERT_TRUE(arm_failpoints(fmt::format("{}=error:ENOSPC", step)));
      const auto saved = directory->write(put("a", "4"));
      ASSERT_TRUE(arm_failpoints(""));
      const bool only_of_a_new_log = std::string_view(step).ends_with("before_rename") ||
                                     std::string_view(step).ends_with("before_directory_sync");
      if (only_of_a_new_log && !of_a_new_log) {
        EXPECT_TRUE(saved);
        continue;
      }
      ASSERT_FALSE(saved) << step;
      EXPECT_EQ(saved.error().code(), ErrorCode::kExhausted);
      {
        const auto bytes = rekindle::testing::read_file(temp / "state");
        const auto state = decode_log(bytes);
        ASSERT_TRUE(state) << step << ": " << state.error().message();
        EXPECT_TRUE(state->at("a") == "3" || state->at("a") == "4") << step;
      }
      ASSERT_TRUE(directory->write(put("b", "5")));
      const Records expected{{"a", "3"}, {"b", "5"}};
      EXPECT_EQ(*directory->load(), expected) << step << ": what failed is written over";
    }
  }
}

// A fleet that publishes and retires for weeks: all that is kept stays small.
TEST(CoordinatorState, C2TwentyThousandVersionsPublishedAndRetiredLeaveASmallState) {
  const rekindle::testing::TempDir temp;
  auto directory = StateDirectory::open(temp.path());
  ASSERT_TRUE(directory);
  StateRecords records = parsed(*directory->load());
  const auto disk = [&](const StateChange& change) -> Result<void> {
    const auto writes = records.encode(change);
    TRY_VOID(directory->write(writes));
    records.note(writes);
    return {};
  };
  TimePoint now{std::chrono::hours(1)};
  Core core({}, {}, {}, [] { return PullId::random(); });
  // A hundred at a time, as a busy coordinator gathers them.
  const auto write_all = [&] {
    while (const auto batch = core.take_batch()) {
      ASSERT_TRUE(disk(batch->change));
      (void)core.committed(batch->number, true, now);
    }
  };
  (void)core.start(now);
  write_all();
  for (std::uint64_t first = 1; first <= 20'000; first += 100) {
    for (std::uint64_t version = first; version < first + 100; ++version) {
      ASSERT_TRUE(core.publish("", {},
                               {{"m", version}, test::numbered_digest(version, 1), {1, 1}, 100},
                               now)
                      .answer);
    }
    write_all();
    for (std::uint64_t version = first; version < first + 100; ++version) {
      ASSERT_TRUE(core.retire({"m", version}, now).answer);
    }
    write_all();
    ASSERT_TRUE(core.fleet().catalog.is_retired({"m", first}));
  }
  EXPECT_LT(core.fleet().catalog.all().size(), 500u);
  EXPECT_TRUE(core.fleet().catalog.live().empty()) << "repair looks at nothing";
  EXPECT_LT(std::filesystem::file_size(temp / "state"), 4u << 20);
  // After a restart the first ones are as retired as the last ones.
  EXPECT_EQ(parsed(*directory->load()).state(), core.fleet().table.state());
  rekindle::testing::DurableCore next({}, {}, parsed(*directory->load()).state(), disk,
                                      [] { return PullId::random(); });
  ASSERT_TRUE(next.start(now));
  for (const std::uint64_t version : {1u, 7u, 10'000u, 19'990u, 20'000u}) {
    EXPECT_TRUE(next.fleet().catalog.is_retired({"m", version})) << version;
  }
  EXPECT_EQ(next.publish("", {}, {"m", 7}, {7, 1}, {1, 1}, 100, now).error().code(),
            ErrorCode::kDenied);
  EXPECT_TRUE(
      next.publish("", {}, {"m", 20'000}, test::numbered_digest(20'000, 1), {1, 1}, 100, now))
      << "the latest ones may come back";
  EXPECT_TRUE(next.publish("", {}, {"m", 20'001}, {1, 1}, {1, 1}, 100, now));
}

}  // namespace
}  // namespace rekindle::coordinator
