#include <map>

#include <sys/wait.h>

#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

class OpenTest : public StoreTest {
 protected:
  Error refused(const fs::path& path) {
    auto store = SegmentStore::open({path, 1 << 20});
    EXPECT_FALSE(store);
    return store ? Error(ErrorCode::kInternal, "opened") : store.error();
  }
};

TEST_F(OpenTest, ANewDirectoryIsPrivate) {
  struct stat status {};
  ASSERT_EQ(::stat(store_path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0700u);
  EXPECT_EQ(store_->directory(), store_path());
}

TEST_F(OpenTest, AForeignDirectoryIsRefusedAndUntouched) {
  const fs::path foreign = temp_.path() / "foreign";
  write_bytes(foreign / "thesis.tex", "x");
  const Error error = refused(foreign);
  EXPECT_EQ(error.code(), ErrorCode::kDenied);
  EXPECT_THAT(error.message(), HasSubstr("thesis.tex"));
  EXPECT_EQ(std::distance(fs::directory_iterator(foreign), {}), 1);
}

TEST_F(OpenTest, ADirectoryThatOthersMayWriteToIsRefused) {
  const fs::path shared = temp_.path() / "shared";
  fs::create_directory(shared);
  for (const ::mode_t mode : {0770u, 0707u}) {
    ASSERT_EQ(::chmod(shared.c_str(), mode), 0);
    const Error error = refused(shared);
    EXPECT_EQ(error.code(), ErrorCode::kDenied);
    EXPECT_THAT(error.message(), HasSubstr("chmod 700"));
  }
}

TEST_F(OpenTest, AFileOrAnotherFormatIsRefused) {
  write_bytes(temp_.path() / "file", "x");
  refused(temp_.path() / "file");
  // An older format as well: nothing of it could be verified.
  for (const std::string format : {"rekindle-store 1", "rekindle-store 3"}) {
    const fs::path other = temp_.path() / format;
    write_bytes(other / ".rekindle-store", format + "\n");
    ASSERT_EQ(::chmod(other.c_str(), 0700), 0);
    EXPECT_THAT(refused(other).message(), HasSubstr("format '" + format + "'"));
  }
}

TEST_F(OpenTest, ACrashInTheVeryFirstOpenIsNoObstacle) {
  const fs::path begun = temp_.path() / "begun";
  write_bytes(begun / ".rekindle-store", "rekin");
  write_bytes(begun / ".rekindle-store.new", "");
  ASSERT_EQ(::chmod(begun.c_str(), 0700), 0);
  EXPECT_NE(open_store(begun), nullptr);
}

TEST_F(OpenTest, OneProcessOwnsAStoreAndTheErrorNamesIt) {
  store_.reset();
  int ready[2];
  int done[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(done), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto store = SegmentStore::open({store_path(), 1 << 20});
    char byte = store ? 'y' : 'n';
    (void)!::write(ready[1], &byte, 1);
    (void)!::read(done[0], &byte, 1);
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ASSERT_EQ(byte, 'y');
  const Error error = refused(store_path());
  EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(error.message(), HasSubstr(fmt::format("process {}", child)));
  ASSERT_EQ(::write(done[1], "x", 1), 1);
  ::waitpid(child, nullptr, 0);
  EXPECT_NE(open_store(store_path()), nullptr);
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) ::close(fd);
}

TEST_F(OpenTest, CommittedCopiesComeBackWithTheirBytes) {
  pull(all_boxes(*checkpoint()));
  pull(shard_boxes(*checkpoint()));
  const std::uint64_t used = store_->used_bytes();
  reopen();
  EXPECT_EQ(store_->find(id_).size(), 2u);
  EXPECT_EQ(store_->used_bytes(), used);
}

TEST_F(OpenTest, ACopyWithADamagedOrMissingPieceIsNotListedAndCanBeReplaced) {
  const auto first = pull(all_boxes(*checkpoint()));
  const fs::path directory = first->directory;
  const fs::path segment = directory / first->manifest.layout.segments()[0].name;
  const std::vector<std::function<void()>> damages = {
      [&] { fs::resize_file(segment, fs::file_size(segment) - 1); },
      [&] { fs::resize_file(segment, fs::file_size(segment) + 1); },
      [&] { fs::remove(segment); },
      [&] { fs::resize_file(directory / "rekindle.manifest", 100); },
      [&] { write_bytes(directory / "rekindle.manifest", ""); },
      [&] { write_bytes(segment, std::string(fs::file_size(segment), '\0')); },
  };
  for (std::size_t i = 0; i < damages.size(); ++i) {
    SCOPED_TRACE(i);
    store_.reset();
    damages[i]();
    store_ = open_store(store_path());
    EXPECT_TRUE(store_->versions().empty());
    EXPECT_GT(store_->used_bytes(), 0u);
    const auto version = pull(all_boxes(*checkpoint()));
    ASSERT_NE(version, nullptr);
    EXPECT_TRUE(verify_version(*version, 1, nullptr));
  }
}

TEST_F(OpenTest, ACopyOfANewerReleaseIsNeitherListedNorChanged) {
  const fs::path directory = pull(all_boxes(*checkpoint()))->directory;
  store_.reset();
  std::string manifest = read_bytes(directory / "rekindle.manifest");
  manifest.replace(6, 2, "03");
  write_bytes(directory / "rekindle.manifest", manifest);
  const auto bytes = [&] {
    std::map<fs::path, std::string> files;
    for (const auto& file : fs::directory_iterator(directory)) files[file] = read_bytes(file);
    return files;
  };
  const auto before = bytes();
  reopen();
  EXPECT_TRUE(store_->versions().empty());
  EXPECT_GT(store_->used_bytes(), 0u);
  store_.reset();
  EXPECT_EQ(bytes(), before);
}

TEST_F(OpenTest, AManifestInAnotherVersionsPlaceIsNotTaken) {
  const fs::path directory = pull(all_boxes(*checkpoint()))->directory;
  store_.reset();
  fs::rename(store_path() / "models" / "org%2Fmodel@1", store_path() / "models" / "org%2Fmodel@2");
  store_ = open_store(store_path());
  EXPECT_TRUE(store_->versions().empty());
}

TEST_F(OpenTest, StraysAreKept) {
  const fs::path copy = pull(all_boxes(*checkpoint()))->directory;
  const std::vector<fs::path> strays = {
      store_path() / "models" / "README", store_path() / "models" / "x@y" / "z",
      copy.parent_path() / "not-a-layout" / "z", copy / "core.1234", store_path() / "mine"};
  for (const fs::path& stray : strays) write_bytes(stray, "s");
  reopen();
  EXPECT_EQ(store_->versions().size(), 1u);
  for (const fs::path& stray : strays) EXPECT_EQ(read_bytes(stray), "s") << stray;
}

TEST_F(OpenTest, WhatAPublishLeftInStagingIsRemoved) {
  write_bytes(store_path() / "staging" / "0123456789abcdef" / "a.safetensors", "x");
  reopen();
  EXPECT_TRUE(fs::is_empty(store_path() / "staging"));
}

}  // namespace
}  // namespace rekindle::store
