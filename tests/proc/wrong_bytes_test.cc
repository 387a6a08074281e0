// Sources that serve other bytes than were published, over both transports: nothing of it is ever
// taken, whatever the reason.
#include <algorithm>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/tensor/safetensors.h"
#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class WrongBytes : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    fleet_.start_coordinator();
    make_checkpoint(fleet_.dir("model"), 48, 1024, 7);  // a tensor is a slice
  }

  void start_source(const std::string& name, const std::string& version = "m@1") {
    fleet_.start_agent(name, {}, "127.0.0.1:0", Fleet::without_leases());
    fleet_.publish(name, version, fleet_.dir("model"));
  }

  fs::path segment_of(const std::string& agent) {
    return find_file(fleet_.agent(agent).store / "models", "model.safetensors");
  }

  // In the memory that an agent serves, as a bad DIMM does it: nothing of the file says so. Pages
  // of tmpfs that were faulted in by reading may be written without a change of its times, and the
  // agent has no lease that would tell of the mapping.
  void write_at(const std::string& agent, std::uint64_t offset, const std::string& bytes) {
    const auto path = segment_of(agent);
    const int fd = ::open(path.c_str(), O_RDWR);
    ASSERT_GE(fd, 0) << path;
    const std::size_t size = fs::file_size(path);
    void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ASSERT_NE(memory, MAP_FAILED);
    ASSERT_EQ(::madvise(memory, size, MADV_POPULATE_READ), 0);
    std::memcpy(static_cast<char*>(memory) + offset, bytes.data(), bytes.size());
    ::munmap(memory, size);
    ::close(fd);
  }
  void rot_everywhere(const std::string& agent) {
    for (std::uint64_t at = 1 << 20; at < fs::file_size(segment_of(agent)); at += 200'003) {
      write_at(agent, at, "!");
    }
  }
  // Every tensor of this agent has the bytes of its neighbour: all of them right, none in its
  // place.
  void swap_tensors(const std::string& agent) {
    const auto header = safetensors::read_header(segment_of(agent));
    ASSERT_TRUE(header) << header.error().message();
    const std::string bytes = read_file(segment_of(agent));
    const auto& entries = header->entries;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const auto& other = entries[i ^ 1];
      write_at(agent, entries[i].offset_bytes,
               bytes.substr(other.offset_bytes, other.info.size_bytes()));
    }
  }

  Fleet::Answer pull(const std::string& version = "m@1") {
    return fleet_.run_command(
        {"pull", version, "--to", fleet_.dir("out").string(), "--transport", GetParam()});
  }
  void expect_complete(const Fleet::Answer& answer) {
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  }
  // Pulls all of it, and again if the others had sent the rest when `name` had sent its first wrong
  // slice: one is forgiven.
  void pull_until_quarantined(const std::string& name) {
    for (int pulls = 0; pulls < 20; ++pulls) {
      fs::remove_all(fleet_.dir("out"));
      const auto answer = pull();
      ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
      const auto& sources = answer.json["sources"];
      const auto source = std::find_if(sources.begin(), sources.end(),
                                       [&](const auto& one) { return one["name"] == name; });
      ASSERT_NE(source, sources.end()) << name << " is not listed: " << answer.json;
      if (!(*source)["lost"]) continue;
      EXPECT_THAT((*source)["cause"].get<std::string>(), HasSubstr("quarantined"));
      EXPECT_GT(answer.json["refetched_bytes"], 0);
      return;
    }
    FAIL() << name << " has not been quarantined";
  }
  void expect_nothing_activated(const Fleet::Answer& answer) {
    EXPECT_NE(answer.exit_code, 0);
    EXPECT_FALSE(fs::exists(fleet_.dir("out") / "rekindle.manifest"));
    EXPECT_FALSE(fs::exists(fleet_.dir("out") / "model.safetensors"));
  }

  Fleet fleet_;
};

INSTANTIATE_TEST_SUITE_P(Transports, WrongBytes, ::testing::Values("tcp", "shm"),
                         [](const auto& test) { return std::string(test.param); });

// Row 9, the first strike.
TEST_P(WrongBytes, Row9AFlippedBitIsFetchedAgainElsewhereAndForgiven) {
  start_source("a");
  const std::uint64_t at = fs::file_size(segment_of("a")) / 2;
  const std::string good = read_file(segment_of("a")).substr(at, 1);
  write_at("a", at, std::string(1, static_cast<char>(good[0] ^ 1)));
  start_source("b");
  Fleet::Answer answer;
  std::uint64_t refetched = 0;
  // Until the wrong slice has come from `a`.
  for (int pulls = 0; pulls < 50 && refetched == 0; ++pulls) {
    fs::remove_all(fleet_.dir("out"));
    answer = pull();
    ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
    refetched = answer.json["refetched_bytes"].get<std::uint64_t>();
  }
  ASSERT_GT(refetched, 0u);
  // Where `b` has yet to connect, the slice comes from `a` again, which makes two wrong ones.
  constexpr std::uint64_t kSliceBytes = 4 << 20;
  for (const auto& source : answer.json["sources"]) {
    const bool is_lost = source["lost"].get<bool>();
    EXPECT_EQ(is_lost, refetched > kSliceBytes && source["name"] == "a") << answer.json;
    if (!is_lost) continue;
    EXPECT_THAT(source["cause"].get<std::string>(), HasSubstr("quarantined"));
  }
}

// Row 10 (and the second strike of row 9).
TEST_P(WrongBytes, Row10ASourceWithRottenMemoryIsQuarantined) {
  start_source("a");
  start_source("b");
  rot_everywhere("a");
  pull_until_quarantined("a");
}

// Row 10 without another source: corrupt bytes are never handed over. A tensor is a slice, or
// several.
TEST_P(WrongBytes, Row10TheOnlySourceWithRottenMemoryIsAnErrorThatNamesItAndWhatToDo) {
  for (const bool one_large : {false, true}) {
    SCOPED_TRACE(one_large);
    if (one_large) {
      make_checkpoint(fleet_.dir("model"), 1, 4096, 7);
      fs::remove(fleet_.dir("model") / "config.json");
      fs::remove_all(fleet_.dir("out"));
    }
    start_source(one_large ? "b" : "a", one_large ? "large@1" : "m@1");
    rot_everywhere(one_large ? "b" : "a");
    const auto answer = pull(one_large ? "large@1" : "m@1");
    expect_nothing_activated(answer);
    EXPECT_EQ(answer.exit_code, 3) << answer.err;
    const std::size_t at = answer.err.find("NO_SOURCE");
    ASSERT_NE(at, std::string::npos) << answer.err;
    const std::string error = answer.err.substr(at);
    EXPECT_THAT(error, HasSubstr(one_large ? "source b is quarantined: it sent wrong bytes of"
                                           : "source a is quarantined: it sent wrong bytes of"));
    EXPECT_THAT(error, HasSubstr("model.layers."));
    EXPECT_THAT(error, HasSubstr("`rekindle verify`"));
    // Nothing of the large tensor has verified: there is nothing to go on from.
    EXPECT_TRUE(!one_large || !fs::exists(fleet_.dir("out")));
  }
}

TEST_P(WrongBytes, Row11RightBytesInTheWrongPlaceAreNotTaken) {
  start_source("a");
  start_source("b");
  ASSERT_NO_FATAL_FAILURE(swap_tensors("a"));
  pull_until_quarantined("a");
}

TEST_P(WrongBytes, Row11RightBytesInTheWrongPlaceFromTheOnlySourceAreAnError) {
  start_source("a");
  ASSERT_NO_FATAL_FAILURE(swap_tensors("a"));
  expect_nothing_activated(pull());
}

}  // namespace
}  // namespace rekindle::testing
