// Rows 8 and 26 for `pull --to DIR`: killed at any step of filling DIR, the same command goes on.
#include <csignal>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;

class ExportStep : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Steps, ExportStep,
                         ::testing::Values("export.after_weights", "export.before_manifest",
                                           "export.after_manifest", "export.before_clean"),
                         [](const auto& test) {
                           std::string name = test.param;
                           name[name.find('.')] = '_';
                           return name;
                         });

TEST_P(ExportStep, KilledThereTheSamePullGoesOnAndFetchesNothing) {
  Fleet fleet;
  fleet.start_agent("a");
  make_checkpoint(fleet.dir("model"), 2, 1024, 5);
  fleet.publish("a", "m@1", fleet.dir("model"));
  const std::string out = fleet.dir("out").string();
  const std::vector<std::string> pull = {"pull", "m@1", "--from", fleet.agent("a").control,
                                         "--to", out};
  for (int round = 0; round < 2; ++round) {  // into an empty directory, over an earlier pull
    SCOPED_TRACE(round);
    Spawn spawn = fleet.command(pull);
    spawn.env = {{"REKINDLE_FAILPOINTS", std::string(GetParam()) + "=kill"}};
    EXPECT_EQ(run(std::move(spawn)).exit.signal, SIGKILL);
    const auto again = fleet.run_command(pull);
    ASSERT_EQ(again.exit_code, 0) << again.err;
    if (GetParam() != std::string("export.before_clean")) {  // else it was done
      EXPECT_EQ(again.json["fetched_bytes"], 0);
    }
    EXPECT_EQ(compare_checkpoints(fleet.dir("model"), out), "");
    EXPECT_EQ(fleet.run_command({"verify", out}).exit_code, 0);
    for (const auto& item : fs::directory_iterator(out)) {
      EXPECT_FALSE(item.path().string().ends_with(".partial")) << item.path();
      EXPECT_FALSE(item.path().filename().string().starts_with(".rekindle")) << item.path();
    }
  }
}

// A pull that never came to its export has made nothing of DIR its own.
TEST(Export, WeightsThatNoPullPutThereAreNotReplacedBecauseOfAnUnfinishedPull) {
  Fleet fleet;
  fleet.start_agent("a");
  make_checkpoint(fleet.dir("model"), 2, 1024, 5);
  fleet.publish("a", "m@1", fleet.dir("model"));
  const fs::path out = fleet.dir("out");
  ASSERT_EQ(fleet
                .run_command({"publish", "other@1", fleet.dir("model").string(), "--copy",
                              "--store", (out / ".rekindle").string()})
                .exit_code,
            0);
  std::ofstream(out / "model.safetensors") << "mine";
  const auto refused =
      fleet.run_command({"pull", "m@1", "--from", fleet.agent("a").control, "--to", out.string()});
  EXPECT_EQ(refused.exit_code, 7) << refused.err;
  EXPECT_THAT(refused.err, ::testing::HasSubstr("model.safetensors"));
  EXPECT_EQ(read_file(out / "model.safetensors"), "mine");
}

}  // namespace
}  // namespace rekindle::testing
