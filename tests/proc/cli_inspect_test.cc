#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/proc/cluster.h"

namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<TensorInfo> kTensors = {{"a.weight", DType::kBF16, {4, 8}},
                                          {"b.bias", DType::kF32, {3}}};

TEST(CliInspect, ShowsAFile) {
  const TempDir dir;
  write_safetensors(dir / "model.safetensors", kTensors, 1);
  const Finished text = rekindle({"inspect", dir / "model.safetensors"});
  EXPECT_EQ(text.exit.code, 0) << text.err;
  EXPECT_THAT(text.out, AllOf(ContainsRegex("a.weight +BF16 +\\[4, 8\\] +64 +model.safetensors"),
                              ContainsRegex("b.bias +F32 +\\[3\\] +12 ")));
  const Json json = json_of(rekindle({"inspect", "--json", dir / "model.safetensors"}));
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["tensor_count"], 2);
  EXPECT_EQ(json["tensor_bytes"], 76);
  EXPECT_EQ(json["tensors"][0]["dtype"], "BF16");
  EXPECT_EQ(json["layout"].get<std::string>().size(), 64U);
  EXPECT_EQ(json["whole"], true);
}

TEST(CliInspect, ADirectoryOfSeveralFilesIsOneCheckpoint) {
  const TempDir dir;
  write_safetensors(dir / "model-00001-of-00002.safetensors", {kTensors[0]}, 1);
  write_safetensors(dir / "model-00002-of-00002.safetensors", {kTensors[1]}, 1);
  write_file(dir / "config.json", "{}");
  const Json json = json_of(rekindle({"inspect", "--json", dir.path()}));
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["files"].size(), 2U);
  EXPECT_EQ(json["tensor_count"], 2);
  EXPECT_EQ(json["extras"], Json::array({"config.json"}));
}

TEST(CliInspect, TheSameTensorInTwoFilesIsRefusedByName) {
  const TempDir dir;
  write_safetensors(dir / "1.safetensors", kTensors, 1);
  write_safetensors(dir / "2.safetensors", {kTensors[1]}, 1);
  const Finished done = rekindle({"inspect", dir.path()});
  EXPECT_EQ(done.exit.code, 2);
  EXPECT_THAT(done.err, HasSubstr("b.bias"));
}

TEST(CliInspect, GarbageNamesTheFile) {
  const TempDir dir;
  write_file(dir / "bad.safetensors", "this is no safetensors file at all");
  const Finished done = rekindle({"inspect", dir / "bad.safetensors"});
  EXPECT_EQ(done.exit.code, 2);
  EXPECT_THAT(done.err, HasSubstr("bad.safetensors"));
}

TEST(CliInspect, NamesCannotDriveTheTerminal) {
  const TempDir dir;
  write_safetensors(dir / "m.safetensors", {{"evil\x1b[2J", DType::kU8, {1}}}, 1);
  const Finished done = rekindle({"inspect", dir / "m.safetensors"});
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("evil\\x1b[2J"), Not(HasSubstr("\x1b"))));
}

// A checkpoint published into a store by the command itself.
class CliVerify : public ::testing::Test {
 protected:
  void SetUp() override {
    write_safetensors(dir_ / "in/model.safetensors",
                      {{"a", DType::kU8, {3, 1 << 20}}, {"b", DType::kF32, {5}}}, 7);
    const Finished done =
        rekindle({"publish", "m@1", dir_ / "in", "--store", dir_ / "store", "--json"});
    ASSERT_EQ(done.exit.code, 0) << done.err;
    copy_ = json_of(done)["path"].get<std::string>();
  }
  std::filesystem::path weights() const { return copy_ / "model.safetensors"; }
  TempDir dir_;
  std::filesystem::path copy_;
};

TEST_F(CliVerify, AcceptsAGoodCopyByDirectoryAndManifest) {
  EXPECT_EQ(rekindle({"verify", copy_}).exit.code, 0);
  const Finished done = rekindle({"verify", copy_ / "rekindle.manifest", "--json"});
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(json_of(done)["ok"], true);
  EXPECT_EQ(json_of(done)["model"], "m");
}

TEST_F(CliVerify, NamesTheTensorWhoseByteIsWrong) {
  std::filesystem::permissions(weights(), std::filesystem::perms(0600));
  {
    std::fstream file(weights(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-(5 * 4) - (1 << 20), std::ios::end);  // in the last row of `a`
    const int byte = file.get();
    file.seekp(-1, std::ios::cur);
    file.put(static_cast<char>(byte ^ 0x40));
  }
  const Finished done = rekindle({"verify", copy_});
  EXPECT_EQ(done.exit.code, 4) << done.err;
  EXPECT_THAT(done.err, HasSubstr("a"));
  EXPECT_EQ(json_of(rekindle({"verify", copy_, "--json"}))["error"]["code"], "CORRUPT");
}

TEST_F(CliVerify, ATruncatedFileIsCorruptNotACrash) {
  std::filesystem::permissions(weights(), std::filesystem::perms(0600));
  std::filesystem::resize_file(weights(), std::filesystem::file_size(weights()) / 2);
  const Finished done = rekindle({"verify", copy_});
  EXPECT_EQ(done.exit.code, 4) << done.err;
  EXPECT_THAT(done.err, HasSubstr("model.safetensors"));
}

TEST_F(CliVerify, ABrokenManifestIsNotTrusted) {
  const std::filesystem::path manifest = copy_ / "rekindle.manifest";
  std::string bytes = read_file(manifest);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  std::filesystem::permissions(manifest, std::filesystem::perms(0600));
  write_file(manifest, bytes);
  const Finished done = rekindle({"verify", copy_});
  EXPECT_EQ(done.exit.code, 4) << done.err;
  EXPECT_THAT(done.err, HasSubstr("manifest"));
}

TEST_F(CliVerify, InspectOfAStoreCopyShowsItsRoot) {
  const Json json = json_of(rekindle({"inspect", copy_, "--json"}));
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["kind"], "store copy");
  EXPECT_EQ(json["model"], "m");
  EXPECT_EQ(json["root"].get<std::string>().size(), 64U);
}

TEST_F(CliVerify, RetireFreesTheStore) {
  const Finished done = rekindle({"retire", "m@1", "--store", dir_ / "store", "--json"});
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_GE(json_of(done)["freed_bytes"].get<std::uint64_t>(), 3U << 20);
  EXPECT_FALSE(std::filesystem::exists(copy_));
  const Finished again = rekindle({"retire", "m@1", "--store", dir_ / "store"});
  EXPECT_EQ(again.exit.code, 3);
  EXPECT_THAT(again.err, ::testing::HasSubstr((dir_ / "store").string()));
  EXPECT_THAT(again.err, ::testing::HasSubstr("no agent runs on it"));
  EXPECT_THAT(again.err, ::testing::HasSubstr("--everywhere"));
}

}  // namespace
}  // namespace rekindle::testing
