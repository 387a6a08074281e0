#include "recovery/worker/core/readiness.h"

#include <algorithm>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace rekindle::worker {
namespace {

Readiness ready_at(std::uint64_t version) {
  Readiness readiness;
  readiness.state = InstanceState::kCommitted;
  readiness.version = ModelVersion{"m", version};
  readiness.world = 2;
  return readiness;
}

Readiness unfit() {
  Readiness readiness;
  readiness.state = InstanceState::kUnfit;
  readiness.unfit_rank = 1;
  readiness.why = "rank 1 died (SIGKILL)";
  return readiness;
}

TEST(ReadyBoardTest, AnInstanceIsReadyOnlyWhileItIsCommitted) {
  ReadyBoard board;
  EXPECT_EQ(board.get("/ready/i").status, 503);
  board.set("i", ready_at(41));
  const auto answer = board.get("/ready/i?verbose=1");
  EXPECT_EQ(answer.status, 200);
  const auto json = nlohmann::json::parse(answer.body);
  EXPECT_EQ(json["version"], 41);
  EXPECT_EQ(json["ready"], true);
  EXPECT_EQ(answer.body.back(), '\n');
  EXPECT_EQ(std::count(answer.body.begin(), answer.body.end(), '\n'), 1);
  board.set("i", unfit());
  const auto now = board.get("/ready/i");
  EXPECT_EQ(now.status, 503);
  EXPECT_EQ(nlohmann::json::parse(now.body)["rank"], 1);
  EXPECT_EQ(nlohmann::json::parse(now.body)["why"], "rank 1 died (SIGKILL)");
  board.remove("i");
  EXPECT_EQ(board.get("/ready/i").status, 503);
}

TEST(ReadyBoardTest, TheAgentIsReadyWhenEveryInstanceIs) {
  ReadyBoard board;
  EXPECT_EQ(board.get("/health").status, 200);
  EXPECT_EQ(board.get("/ready").status, 503) << "there is none";
  board.set("a", ready_at(41));
  EXPECT_EQ(board.get("/ready").status, 200);
  board.set("b", unfit());
  const auto answer = board.get("/ready");
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(nlohmann::json::parse(answer.body)["why"]["b"], "rank 1 died (SIGKILL)");
}

TEST(ReadyBoardTest, AnythingElseIsNotFound) {
  const ReadyBoard board;
  for (const char* target :
       {"", "/", "/readyx", "/ready/", "/ready/..", "/ready/a/b", "/ready/%61", "*", "/health/"}) {
    EXPECT_EQ(board.get(target).status, 404) << target;
  }
}

}  // namespace
}  // namespace rekindle::worker
