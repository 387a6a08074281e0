// Rows 8 and 26 for `pull --to DIR`: killed at any step of filling DIR, the same command goes on.
#include <algorithm>
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

// A checkpoint of a stranger, and the directories into which it is pulled.
class HostileCheckpoint : public ::testing::Test {
 protected:
  HostileCheckpoint() {
    fleet_.start_agent("a");
    make_checkpoint(fleet_.dir("model"), 2, 1024, 5);
  }
  void write(const std::string& name, const std::string& content) {
    write_file(fleet_.dir("model") / name, content);
  }
  std::vector<std::string> pull_words(std::vector<std::string> more = {}) {
    std::vector<std::string> words = {"pull", "m@1",        "--from", fleet_.agent("a").control,
                                      "--to", out_.string()};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  Fleet fleet_;
  const fs::path out_ = fleet_.dir("out");
  const fs::path mine_ = fleet_.dir("mine");
};

TEST_F(HostileCheckpoint, ItsCodeIsWrittenOnlyIfThatIsAllowed) {
  write("evil.py", "import os");
  write("1_Pooling/evil.py", "import os");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  const auto pulled = fleet_.run_command(pull_words());
  ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
  EXPECT_THAT(pulled.json["left_out"],
              ::testing::UnorderedElementsAre("evil.py", "1_Pooling/evil.py"));
  EXPECT_FALSE(fs::exists(out_ / "evil.py"));
  EXPECT_FALSE(fs::exists(out_ / "1_Pooling"));
  const auto allowed = fleet_.run_command(pull_words({"--allow-code"}));
  ASSERT_EQ(allowed.exit_code, 0) << allowed.err;
  EXPECT_TRUE(allowed.json["left_out"].empty());
  EXPECT_EQ(read_file(out_ / "evil.py"), "import os");
  EXPECT_EQ(read_file(out_ / "1_Pooling/evil.py"), "import os");
  const auto permissions = fs::status(out_ / "evil.py").permissions();
  const auto execute = fs::perms::owner_exec | fs::perms::group_exec | fs::perms::others_exec;
  EXPECT_EQ(permissions & execute, fs::perms::none);
}

TEST_F(HostileCheckpoint, HiddenFilesScriptsAndNamesWithControlCharactersDoNotTravel) {
  for (const char* name : {".bashrc", ".ssh/authorized_keys", ".config.json", "a/.hidden.json",
                           "run.sh", "a/b/deep.json", "two\nlines.json", "\x1b[2J.json"}) {
    write(name, "evil");
  }
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  const auto pulled = fleet_.run_command(pull_words());
  ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
  std::vector<std::string> names;
  for (const auto& item : fs::recursive_directory_iterator(out_)) {
    names.push_back(item.path().filename().string());
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("config.json", "model.safetensors",
                                                     "rekindle.manifest"));
}

TEST_F(HostileCheckpoint, TwoNamesThatDifferInCaseOnlyAreRefused) {
  write("Config.json", "{}");
  fleet_.start_agent("b", {}, "127.0.0.1:0",
                     {"env", "REKINDLE_FAILPOINTS=publish.any_names=error:EIO"});
  fleet_.publish("b", "m@1", fleet_.dir("model"));
  std::vector<std::string> words = pull_words();
  std::ranges::replace(words, fleet_.agent("a").control, fleet_.agent("b").control);
  const auto refused = fleet_.run_command(words);
  EXPECT_EQ(refused.exit_code, 2) << refused.err;
  EXPECT_THAT(refused.err, ::testing::HasSubstr("'Config.json' and 'config.json'"));
  EXPECT_FALSE(fs::exists(out_ / "rekindle.manifest"));
}

TEST_F(HostileCheckpoint, ALinkThatIsPutInItsPlaceDuringThePullIsNotFollowed) {
  write("1_Pooling/config.json", "{}");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  fs::create_directory(mine_);
  Spawn spawn = fleet_.command(pull_words());
  spawn.env = {{"REKINDLE_FAILPOINTS", "export.after_weights=sleep:2000"}};
  Process pulling(std::move(spawn));
  ASSERT_TRUE(eventually([&] { return fs::exists(out_ / "model.safetensors"); }));
  fs::create_directory_symlink(mine_, out_ / "1_Pooling");
  const auto ended = pulling.wait();
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->code, 7) << pulling.err();
  EXPECT_THAT(pulling.err(), ::testing::HasSubstr("1_Pooling is a symbolic link"));
  EXPECT_TRUE(fs::is_empty(mine_));
  fs::remove(out_ / "1_Pooling");
  const auto again = fleet_.run_command(pull_words());
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), out_), "");
}

TEST_F(HostileCheckpoint, ADirectoryWhoseInnerStoreIsALinkIsRefused) {
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  fs::create_directory(mine_);
  fs::create_directory(out_);
  fs::create_directory_symlink(mine_, out_ / ".rekindle");
  const auto refused = fleet_.run_command(pull_words());
  EXPECT_EQ(refused.exit_code, 7);
  EXPECT_THAT(refused.err, ::testing::HasSubstr(".rekindle is a symbolic link"));
  EXPECT_TRUE(fs::is_empty(mine_));
}

}  // namespace
}  // namespace rekindle::testing
