// Artifact sets: what is packed, and what the unpacker refuses.
#include "tools/cli/artifact_set.h"

#include <fcntl.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/store/segment_store.h"
#include "src/tensor/safetensors.h"
#include "tests/support/process.h"

namespace rekindle::cli {
namespace {

namespace fs = std::filesystem;
using rekindle::testing::read_file;
using rekindle::testing::TempDir;
using rekindle::testing::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A tensor of a hand-made set, and its bytes.
struct Entry {
  std::string name;
  std::string bytes;
  DType dtype = DType::kU8;
};

class ArtifactSet : public ::testing::Test {
 protected:
  struct Copy {
    fs::path path;
    Digest root;
  };

  // A committed copy of a set with these tensors, as a hostile publisher may have made it.
  Copy commit(const std::vector<Entry>& entries) {
    std::vector<TensorInfo> tensors;
    std::string bytes;
    for (const Entry& entry : entries) {
      tensors.push_back({entry.name, entry.dtype, Shape{entry.bytes.size()}});
      bytes += entry.bytes;
    }
    const auto header = safetensors::make_header(tensors, {}, 8);
    EXPECT_TRUE(header) << header.error().message();
    const fs::path file = dir_ / "set.safetensors";
    write_file(file, *header + bytes);
    return commit_file(file);
  }

  Copy commit_file(const fs::path& file) {
    auto store = store::SegmentStore::open({.directory = dir_ / "store"});
    EXPECT_TRUE(store) << store.error().message();
    const fs::path paths[] = {file};
    auto staged = (*store)->stage({"artifacts/m/h", ++version_}, paths, [](const auto&) {});
    EXPECT_TRUE(staged) << staged.error().message();
    const auto copy = (*store)->commit_staged(*staged);
    EXPECT_TRUE(copy) << copy.error().message();
    return {(*copy)->directory, (*copy)->manifest.checkpoint->root};
  }

  Result<UnpackReport> unpack(const Copy& copy, std::string_view fingerprint = "F") {
    const CacheDirectory caches[] = {{"t", target()}};
    return unpack_artifacts(copy.path, copy.root, fingerprint, caches);
  }

  fs::path target() const { return dir_ / "target"; }
  fs::path cache() const { return dir_ / "cache"; }
  void add(const std::string& name, const std::string& bytes) {
    fs::create_directories((cache() / name).parent_path());
    write_file(cache() / name, bytes);
  }
  std::vector<std::string> listed() {
    const CacheDirectory caches[] = {{"t", cache()}};
    const auto files = list_caches(caches);
    EXPECT_TRUE(files) << files.error().message();
    std::vector<std::string> names;
    for (const CacheFile& file : *files) names.push_back(file.tensor);
    return names;
  }
  Result<void> pack(const fs::path& out) {
    const CacheDirectory caches[] = {{"t", cache()}};
    TRY(const auto files, list_caches(caches));
    return pack_caches(files, "F", out);
  }
  static bool is_empty(const fs::path& directory) {
    return !fs::exists(directory) || fs::is_empty(directory);
  }

  TempDir dir_{true};
  std::uint64_t version_ = 0;
};

TEST_F(ArtifactSet, AllFilesComeBackAlsoEmptyOnesAndThoseOfManyTiles) {
  std::string large;
  for (int i = 0; i < 1'000'000; ++i) large += std::to_string(i);
  add("one", "1");
  add("empty", "");
  add("deep/er/large", large);
  ASSERT_TRUE(pack(dir_ / "set.safetensors"));
  const auto report = unpack(commit_file(dir_ / "set.safetensors"));
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->files, 3u);
  EXPECT_EQ(report->written, 3u);
  EXPECT_EQ(report->bytes, large.size() + 1);
  EXPECT_EQ(read_file(target() / "one"), "1");
  EXPECT_EQ(read_file(target() / "empty"), "");
  EXPECT_EQ(read_file(target() / "deep/er/large"), large);
}

TEST_F(ArtifactSet, LinksLocksAndUnfinishedFilesAreNotListed) {
  add("kept", "1");
  add("locks/a.lock", "");
  add("b.tmp", "half");
  add("tmp.pid_7/half", "half");
  fs::create_symlink("/etc/passwd", cache() / "link");
  fs::create_directory_symlink("/etc", cache() / "links");
  ASSERT_EQ(::mkfifo((cache() / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(listed(), ElementsAre("files/t/kept"));
}

TEST_F(ArtifactSet, EqualFilesMakeEqualSetsWhateverTheirTimesAndModes) {
  add("b", "2");
  add("a/c", "1");
  ASSERT_TRUE(pack(dir_ / "first"));
  fs::remove_all(cache());
  add("a/c", "1");
  add("b", "2");
  fs::permissions(cache() / "b", fs::perms::owner_all);
  fs::last_write_time(cache() / "b", fs::file_time_type() - std::chrono::hours(1));
  ASSERT_TRUE(pack(dir_ / "second"));
  EXPECT_EQ(read_file(dir_ / "first"), read_file(dir_ / "second"));
}

TEST_F(ArtifactSet, AFileThatChangedAfterItWasListedIsNotPacked) {
  for (const char* const bytes : {"longer", "", "2"}) {
    add("a", "1");
    const CacheDirectory caches[] = {{"t", cache()}};
    const auto files = list_caches(caches);
    ASSERT_TRUE(files);
    add("a", bytes);
    fs::last_write_time(cache() / "a", fs::file_time_type());
    fs::remove(dir_ / "out");
    const auto packed = pack_caches(*files, "F", dir_ / "out");
    ASSERT_FALSE(packed) << bytes;
    EXPECT_EQ(packed.error().code(), ErrorCode::kUnavailable);
    EXPECT_THAT(packed.error().message(), HasSubstr((cache() / "a").string()));
  }
}

TEST_F(ArtifactSet, HostilePathsAreRefusedBeforeAnythingIsWritten) {
  const std::string escapes[] = {
      "files/t/../up",
      "files/t/a/../../up",
      "files/t//abs",
      "files/t/./a",
      "files/../t/a",
      "files//a",
      "files/t/",
      "files/t",
      "files/t/a/",
      "files/t/a\nb",
      "files/t/\x7f",
      std::string("files/t/a\0b", 11),
      "/etc/passwd",
      "file",
      "files/t t/a",
      "files/t/.rekindle-artifacts.x/a",
      "files/t/" + std::string(256, 'a'),
      "files/t/" + std::string(4000, '/'),
  };
  std::string deep = "files/t";
  for (int i = 0; i < 40; ++i) deep += "/d";
  std::vector<std::string> names(std::begin(escapes), std::end(escapes));
  names.push_back(deep);
  for (const std::string& name : names) {
    const auto report = unpack(commit({{"fingerprint", "F"}, {"files/t/good", "1"}, {name, "2"}}));
    ASSERT_FALSE(report) << name;
    EXPECT_EQ(report.error().code(), ErrorCode::kInvalid) << name;
    EXPECT_TRUE(is_empty(target())) << name;
  }
  EXPECT_FALSE(fs::exists(dir_ / "up"));
}

TEST_F(ArtifactSet, AFileThatIsAlsoADirectoryIsRefused) {
  const auto report = unpack(commit(
      {{"fingerprint", "F"}, {"files/t/a", "1"}, {"files/t/a-b", "1"}, {"files/t/a/b", "2"}}));
  ASSERT_FALSE(report);
  EXPECT_THAT(report.error().message(), HasSubstr("files/t/a"));
  EXPECT_TRUE(is_empty(target()));
}

TEST_F(ArtifactSet, ACheckpointIsNoArtifactSet) {
  const std::vector<std::vector<Entry>> others = {
      {{"model.weight", "12"}},
      {{"files/t/a", "1"}},
      {{"fingerprint", "F"}, {"files/t/a", "12", DType::kI8}},
      {{"fingerprint", "F", DType::kI8}, {"files/t/a", "1"}}};
  for (const auto& entries : others) {
    const auto report = unpack(commit(entries));
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code(), ErrorCode::kInvalid);
    EXPECT_TRUE(is_empty(target()));
  }
}

TEST_F(ArtifactSet, AnotherFingerprintIsRefusedAlsoUnderTheSameName) {
  const Copy copy = commit({{"fingerprint", "F"}, {"files/t/a", "1"}});
  for (const std::string_view other : {"G", "", "FF"}) {
    const auto report = unpack(copy, other);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code(), ErrorCode::kStale);
  }
  const auto huge = unpack(commit({{"fingerprint", std::string(1 << 20, 'F')}}));
  ASSERT_FALSE(huge);
  EXPECT_EQ(huge.error().code(), ErrorCode::kStale);
  EXPECT_TRUE(is_empty(target()));
}

TEST_F(ArtifactSet, AByteThatDoesNotMatchItsDigestIsNeverWritten) {
  const Copy copy = commit({{"fingerprint", "F"}, {"files/t/a", "1"}, {"files/t/b", "precious"}});
  const fs::path file = copy.path / "set.safetensors";
  std::string bytes = read_file(file);
  bytes[bytes.find("precious")] = 'P';
  write_file(file, bytes);
  const auto report = unpack(copy);
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(report.error().message(), HasSubstr("files/t/b"));
  // Neither the other file of the cache nor an unfinished one is left.
  EXPECT_TRUE(is_empty(target()));
}

TEST_F(ArtifactSet, ACopyOfAnotherVersionIsRefusedByItsRoot) {
  const Copy first = commit({{"fingerprint", "F"}, {"files/t/a", "1"}});
  const Copy second = commit({{"fingerprint", "F"}, {"files/t/a", "2"}});
  const auto report = unpack({first.path, second.root});
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code(), ErrorCode::kCorrupt);
  EXPECT_TRUE(is_empty(target()));
}

TEST_F(ArtifactSet, FilesThatAreThereStayAsTheyAre) {
  const Copy copy = commit({{"fingerprint", "F"},
                            {"files/t/same", "1"},
                            {"files/t/other", "22"},
                            {"files/t/size", "333"},
                            {"files/t/link", "4"},
                            {"files/t/dir", "5"},
                            {"files/t/new", "6"}});
  fs::create_directories(target() / "dir");
  write_file(target() / "same", "1");
  write_file(target() / "other", "xx");
  write_file(target() / "size", "xx");
  write_file(dir_ / "outside", "outside");
  fs::create_symlink(dir_ / "outside", target() / "link");
  const auto report = unpack(copy);
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->written, 1u);
  EXPECT_EQ(report->kept, 4u);
  EXPECT_EQ(read_file(target() / "other"), "xx");
  EXPECT_EQ(read_file(target() / "size"), "xx");
  EXPECT_EQ(read_file(dir_ / "outside"), "outside");
  EXPECT_TRUE(fs::is_symlink(target() / "link"));
  EXPECT_TRUE(fs::is_directory(target() / "dir"));
  EXPECT_EQ(read_file(target() / "new"), "6");
}

TEST_F(ArtifactSet, NoLinkInTheCacheLeadsOutOfIt) {
  const Copy copy = commit({{"fingerprint", "F"}, {"files/t/d/a", "1"}});
  fs::create_directories(target());
  fs::create_directories(dir_ / "outside");
  fs::create_directory_symlink(dir_ / "outside", target() / "d");
  const auto report = unpack(copy);
  ASSERT_FALSE(report);
  EXPECT_THAT(report.error().message(), HasSubstr((target() / "d/a").string()));
  EXPECT_TRUE(is_empty(dir_ / "outside"));
}

TEST_F(ArtifactSet, WhatAKilledProcessLeftGoesWithTheNextFetch) {
  fs::create_directories(target() / ".rekindle-artifacts.dead");
  write_file(target() / ".rekindle-artifacts.dead/0", "half");
  ASSERT_TRUE(unpack(commit({{"fingerprint", "F"}, {"files/t/a", "1"}})));
  EXPECT_EQ(std::distance(fs::directory_iterator(target()), fs::directory_iterator()), 1);
}

TEST_F(ArtifactSet, CachesThatTheCallerDoesNotNameAreLeftOut) {
  const auto report =
      unpack(commit({{"fingerprint", "F"}, {"files/t/a", "1"}, {"files/u/b", "2"}}));
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->files, 1u);
  EXPECT_EQ(report->unwanted, 1u);
  EXPECT_FALSE(fs::exists(target() / "b"));
}

TEST(ArtifactNames, TheHashDependsOnTheModelAndTheFingerprint) {
  const auto one = fingerprint_hash("m", "F");
  ASSERT_TRUE(one);
  EXPECT_EQ(one->size(), 32u);
  EXPECT_EQ(*fingerprint_hash("m", "F"), *one);
  EXPECT_NE(*fingerprint_hash("m", "G"), *one);
  EXPECT_NE(*fingerprint_hash("n", "F"), *one);
  EXPECT_FALSE(fingerprint_hash("m", ""));
  EXPECT_FALSE(fingerprint_hash("m", std::string(kMaxFingerprintBytes + 1, 'x')));
  EXPECT_EQ(*artifact_set_name("org/m", *one), "artifacts/org/m/" + *one);
  for (const std::string& bad :
       {std::string(""), std::string("../m"), std::string("m@1"), std::string(190, 'm')}) {
    EXPECT_FALSE(artifact_set_name(bad, *one)) << bad;
  }
}

TEST(ArtifactNames, ACacheIsANameAndADirectory) {
  const auto caches = parse_cache_directories({"a=/x/y/", "b_2-C=rel=1"});
  ASSERT_TRUE(caches) << caches.error().message();
  EXPECT_EQ((*caches)[0].path, "/x/y");
  EXPECT_EQ((*caches)[1].path, fs::current_path() / "rel=1");
  for (const char* bad : {"", "a", "a=", "=b", "a/b=c", "a b=c", "..=c"}) {
    EXPECT_FALSE(parse_cache_directories({bad})) << bad;
  }
  EXPECT_FALSE(parse_cache_directories({"a=/x", "a=/y"}));
}

}  // namespace
}  // namespace rekindle::cli
