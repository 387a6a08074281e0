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
                .run_command({"publish", "other@1", fleet.dir("model").string(), "--store",
                              (out / ".rekindle").string()})
                .exit_code,
            0);
  std::ofstream(out / "model.safetensors") << "mine";
  const auto refused =
      fleet.run_command({"pull", "m@1", "--from", fleet.agent("a").control, "--to", out.string()});
  EXPECT_EQ(refused.exit_code, 7) << refused.err;
  EXPECT_THAT(refused.err, ::testing::HasSubstr("model.safetensors"));
  EXPECT_EQ(read_file(out / "model.safetensors"), "mine");
}

// Between the commit and the export the files have names that others of this user can take.
TEST(Export, B8AFileThatIsReplacedBeforeItIsLinkedIsAnErrorAndTheSamePullPutsItRight) {
  Fleet fleet;
  fleet.start_agent("a");
  make_checkpoint(fleet.dir("model"), 2, 1024, 5);
  fleet.publish("a", "m@1", fleet.dir("model"));
  const fs::path out = fleet.dir("out");
  const std::vector<std::string> pull = {"pull", "m@1",       "--from", fleet.agent("a").control,
                                         "--to", out.string()};
  Spawn spawn = fleet.command(pull);
  spawn.env = {{"REKINDLE_FAILPOINTS", "export.before_link=sleep:2000"}};
  Process pulling(std::move(spawn));
  ASSERT_TRUE(eventually([&] { return fs::exists(out / ".rekindle" / "exporting"); }));
  const fs::path segment = find_file(out / ".rekindle" / "models", "model.safetensors");
  std::string bytes = read_file(segment);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(fleet.dir("other"), bytes);
  fs::rename(fleet.dir("other"), segment);
  const auto ended = pulling.wait();
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->code, 4) << pulling.err();
  EXPECT_THAT(pulling.err(), ::testing::HasSubstr("run the same pull again"));
  EXPECT_FALSE(fs::exists(out / "rekindle.manifest"));
  EXPECT_FALSE(fs::exists(out / "model.safetensors"));
  const auto again = fleet.run_command(pull);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(compare_checkpoints(fleet.dir("model"), out), "");
  EXPECT_EQ(fleet.run_command({"verify", out.string()}).exit_code, 0);
}

// Whoever may write to DIR beforehand does not choose which of the puller's files is overwritten.
TEST(Export, S8NothingIsWrittenThroughSymbolicLinks) {
  Fleet fleet;
  fleet.start_agent("a");
  make_checkpoint(fleet.dir("model"), 2, 1024, 5);
  write_file(fleet.dir("model") / "1_Pooling" / "config.json", "{}");
  fleet.publish("a", "m@1", fleet.dir("model"));
  const fs::path out = fleet.dir("out");
  const fs::path mine = fleet.dir("mine");
  write_file(mine / "precious", "mine");
  fs::create_directory(out);
  for (const char* name : {"config.json", "config.json.partial", "model.safetensors.partial",
                           "rekindle.manifest.partial"}) {
    fs::create_symlink(mine / "precious", out / name);
  }
  const std::vector<std::string> pull = {"pull", "m@1",       "--from", fleet.agent("a").control,
                                         "--to", out.string()};
  const auto pulled = fleet.run_command(pull);
  ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
  EXPECT_EQ(read_file(mine / "precious"), "mine");
  EXPECT_EQ(compare_checkpoints(fleet.dir("model"), out), "");
  EXPECT_FALSE(fs::is_symlink(out / "config.json"));

  fs::remove_all(out);
  fs::create_directory(out);
  fs::create_directory_symlink(mine, out / "1_Pooling");
  const auto refused = fleet.run_command(pull);
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_THAT(refused.err, ::testing::HasSubstr("1_Pooling is a symbolic link"));
  EXPECT_FALSE(fs::exists(mine / "config.json"));
}

}  // namespace
}  // namespace rekindle::testing
