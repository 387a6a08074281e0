#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/coordinator/state_directory.h"
#include "src/base/failpoint.h"
#include "tests/support/process.h"

namespace rekindle::coordinator {
namespace {

using ::testing::HasSubstr;

DurableState sample(std::uint64_t epoch) {
  DurableState state;
  state.epoch = epoch;
  state.versions[{"qwen3", 41}] = {{1, 2}, {3, 4}, 1000, false};
  state.versions[{"qwen3", 42}] = {{5, 6}, {7, 8}, 2000, true};
  state.versions[{"qwen3", 43}] = {
      {5, 9}, {7, 8}, 2000, false, 0};  // none, though others have some
  state.versions[{"qwen3", 44}] = {{5, 10}, {7, 8}, 2000, false, 3};
  state.drained = {"a", "b"};
  return state;
}

TEST(CoordinatorState, WhatWasSavedIsLoaded) {
  const rekindle::testing::TempDir temp;
  auto directory = StateDirectory::open(temp / "state");
  ASSERT_TRUE(directory) << directory.error().message();
  EXPECT_EQ(*directory->load(), DurableState{}) << "nothing yet";
  ASSERT_TRUE(directory->save(sample(3)));
  EXPECT_EQ(*directory->load(), sample(3));
  ASSERT_TRUE(directory->save(sample(4)));
  EXPECT_EQ(*directory->load(), sample(4));
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

TEST(CoordinatorState, EveryDamagedByteIsNoticed) {
  const std::string bytes = encode_state(sample(3));
  ASSERT_EQ(*decode_state(bytes), sample(3));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (const int bit : {0, 7}) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      ASSERT_FALSE(decode_state(damaged)) << "byte " << i;
    }
  }
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_FALSE(decode_state(bytes.substr(0, size))) << "cut to " << size;
  }
  EXPECT_FALSE(decode_state(bytes + "x"));
}

TEST(CoordinatorState, ADamagedFileIsAnErrorThatNamesItAndIsLeftAlone) {
  const rekindle::testing::TempDir temp;
  auto directory = StateDirectory::open(temp.path());
  ASSERT_TRUE(directory->save(sample(3)));
  rekindle::testing::write_file(temp / "state", "not a state");
  const auto state = directory->load();
  ASSERT_FALSE(state);
  EXPECT_EQ(state.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(state.error().message(), HasSubstr((temp / "state").string()));
  EXPECT_EQ(rekindle::testing::read_file(temp / "state"), "not a state");
}

constexpr const char* kSteps[] = {"coordinator.state.half_written", "coordinator.state.before_sync",
                                  "coordinator.state.before_rename",
                                  "coordinator.state.before_directory_sync",
                                  "coordinator.state.saved"};

TEST(CoordinatorState, AnErrorAtAnyStepLeavesTheOldOrTheNewState) {
  for (const char* step : kSteps) {
    const rekindle::testing::TempDir temp;
    auto directory = StateDirectory::open(temp.path());
    ASSERT_TRUE(directory->save(sample(3)));
    ASSERT_TRUE(arm_failpoints(fmt::format("{}=error:ENOSPC", step)));
    const auto saved = directory->save(sample(4));
    ASSERT_TRUE(arm_failpoints(""));
    ASSERT_FALSE(saved) << step;
    EXPECT_EQ(saved.error().code(), ErrorCode::kExhausted);
    const auto state = directory->load();
    ASSERT_TRUE(state) << step;
    EXPECT_TRUE(*state == sample(3) || *state == sample(4)) << step;
    EXPECT_TRUE(directory->save(sample(5)));
    EXPECT_EQ(*directory->load(), sample(5));
  }
}

}  // namespace
}  // namespace rekindle::coordinator
