// Whoever rewrites files, before or after they are in a store: workers and pullers get the bytes
// that were published, or an error.
#include <algorithm>
#include <map>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include "src/tensor/safetensors.h"
#include "tests/proc/worker_fixture.h"
#include "tests/support/worker_sum.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// What worker_main.cc says of these files, from the files alone.
std::string sum_of_files(const fs::path& directory) {
  const std::string weights = read_file(directory / "model.safetensors");
  std::map<std::string, std::string> tensors;
  const auto header = safetensors::read_header(directory / "model.safetensors");
  EXPECT_TRUE(header) << header.error().message();
  for (const auto& entry : header->entries) {
    tensors[entry.info.name] = weights.substr(entry.offset_bytes, entry.info.size_bytes());
  }
  tensors["__rekindle_file__/config.json"] = read_file(directory / "config.json");
  return worker_sum(tensors);
}

// Through a descriptor, as any program does it.
void rewrite_in_place(const fs::path& file) {
  const int fd = ::open(file.c_str(), O_RDWR);
  ASSERT_GE(fd, 0) << file;
  const auto size = static_cast<off_t>(fs::file_size(file));
  const std::string wrong(4096, 'w');
  for (off_t at = 1 << 20; at + 4096 < size; at += 65'536) {
    ASSERT_EQ(::pwrite(fd, wrong.data(), wrong.size(), at), 4096);
  }
  ::close(fd);
}

class PublishedBytes : public WithWorkers {
 protected:
  void SetUp() override {
    make_checkpoint(fleet_.dir("model"), 8, 1024, 7);
    published_ = sum_of_files(fleet_.dir("model"));
    fleet_.start_coordinator();
    fleet_.start_agent("a");
    fleet_.publish("a", "m@1", fleet_.dir("model"));
  }
  fs::path segment_of(const std::string& agent) {
    return find_file(fleet_.agent(agent).store / "models", "model.safetensors");
  }
  bool any_node_is_quarantined() {
    const auto status = fleet_.run_command({"status"}).json;
    return status.dump().find("\"quarantined\"") != std::string::npos;
  }
  std::string published_;
};

TEST_F(PublishedBytes, B1AreServedAfterTheirOwnerRewroteTheFiles) {
  rewrite_in_place(fleet_.dir("model") / "model.safetensors");
  ASSERT_NE(sum_of_files(fleet_.dir("model")), published_);
  const auto local = worker("a");
  EXPECT_EQ(sum_of(*local), published_) << local->out() << local->err();
  fleet_.start_agent("b");
  const auto remote = worker("b");
  EXPECT_EQ(sum_of(*remote), published_) << remote->out() << remote->err();
  EXPECT_FALSE(any_node_is_quarantined());
}

TEST_F(PublishedBytes, B1AreFetchedFromPeersAfterACommittedSegmentWasRewritten) {
  fleet_.start_agent("b");
  {
    const auto first = worker("b");
    ASSERT_EQ(sum_of(*first), published_) << first->out() << first->err();
  }
  rewrite_in_place(segment_of("b"));
  EXPECT_TRUE(eventually([&] {
    const auto again = worker("b");
    const std::string now = sum_of(*again);
    EXPECT_TRUE(now.empty() || now == published_) << "wrong bytes were handed out as ready";
    return now == published_;
  }));
  EXPECT_FALSE(any_node_is_quarantined());
  // The node serves its other versions, and this one again.
  const auto pulled = fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()});
  ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
}

TEST_F(PublishedBytes, B1AreMissedWithTheNameOfATensorWhereNobodyElseHasThem) {
  rewrite_in_place(segment_of("a"));
  const auto one = worker("a");
  EXPECT_TRUE(one->wait_for_out("lost")) << one->out() << one->err();
  EXPECT_THAT(one->out(), HasSubstr("tensor 'model.layers."));
  EXPECT_EQ(one->out().find("ready"), std::string::npos) << one->out();
}

// A puller trusts nobody, and need not find out by itself: the source looks first.
TEST_F(PublishedBytes, B1ARewrittenSegmentIsServedToNoPeerAndItsNodeStaysInUse) {
  fleet_.publish("a", "other@1", fleet_.dir("model"));
  fleet_.start_agent("b");
  const auto copied =
      fleet_.run_command({"pull", "m@1", "--store", fleet_.agent("b").store.string()});
  ASSERT_EQ(copied.exit_code, 0) << copied.err;
  rewrite_in_place(segment_of("b"));
  for (int i = 0; i < 3; ++i) {
    const auto out = fleet_.dir("out" + std::to_string(i));
    const auto pulled = fleet_.run_command({"pull", "m@1", "--to", out.string()});
    ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
    EXPECT_EQ(pulled.json["refetched_bytes"], 0) << "b sent wrong bytes";
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), out), "");
  }
  EXPECT_FALSE(any_node_is_quarantined());
}

// No time stamp of a file on tmpfs tells of such a store.
TEST_F(PublishedBytes, B1AreHandedOutAfterSomebodyStoredThroughAMapping) {
  fleet_.start_agent("b");
  const auto copied =
      fleet_.run_command({"pull", "m@1", "--store", fleet_.agent("b").store.string()});
  ASSERT_EQ(copied.exit_code, 0) << copied.err;
  const fs::path file = segment_of("b");
  const std::size_t size = fs::file_size(file);
  const int fd = ::open(file.c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  void* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  ::close(fd);
  ASSERT_EQ(::madvise(mapped, size, MADV_POPULATE_READ), 0);
  {
    // From now on its bytes may change at any moment: they are not used.
    const auto one = worker("b");
    EXPECT_TRUE(one->wait_for_out("lost")) << one->out() << one->err();
    EXPECT_THAT(one->out(), HasSubstr(file.string() + " is open or mapped for writing"));
    EXPECT_EQ(one->out().find("ready"), std::string::npos) << one->out();
  }
  for (std::size_t at = 1 << 20; at < size; at += 65'536) static_cast<char*>(mapped)[at] ^= 1;
  ::munmap(mapped, size);
  EXPECT_TRUE(eventually([&] {
    const auto again = worker("b");
    const std::string now = sum_of(*again);
    EXPECT_TRUE(now.empty() || now == published_) << "wrong bytes were handed out as ready";
    return now == published_;
  }));
}

// Who knows the root needs to trust neither the coordinator nor a source.
TEST_F(PublishedBytes, AreFetchedByTheirRootOrNotAtAll) {
  const auto pull = [&](const std::string& root, std::vector<std::string> more) {
    std::vector<std::string> words{"pull",   "m@1", "--to", fleet_.dir("out").string(),
                                   "--root", root};
    words.insert(words.end(), more.begin(), more.end());
    return fleet_.run_command(words);
  };
  const auto known =
      fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("first").string()}).json["root"];
  const auto right = pull(known, {});
  ASSERT_EQ(right.exit_code, 0) << right.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  fs::remove_all(fleet_.dir("out"));

  const std::string other(64, '7');
  for (const auto& more :
       {std::vector<std::string>{}, {"--from", fleet_.agent("a").control}, {"--dry-run"}}) {
    const auto wrong = pull(other, more);
    EXPECT_NE(wrong.exit_code, 0);
    EXPECT_THAT(wrong.err,
                HasSubstr("m@1 has root " + known.get<std::string>() + " there, and not " + other));
    EXPECT_FALSE(fs::exists(fleet_.dir("out") / "model.safetensors"));
  }
  const auto nonsense = pull("12ab", {});
  EXPECT_THAT(nonsense.err, HasSubstr("--root 12ab: "));
}

}  // namespace
}  // namespace rekindle::testing
