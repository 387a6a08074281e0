// A trainer's side: memory of the agent, filled and committed.
#include <cstring>
#include <functional>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/worker.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using Kind = proto::WorkerFrame;

// Copied in several units.
const std::uint64_t kMatrix[] = {512, 1024};
constexpr std::uint64_t kMatrixBytes = 512 * 1024 * 4;
const std::uint64_t kNone[] = {0};
const rk_tensor_spec kSpecs[] = {{"z", "F32", 2, kMatrix},
                                 {"a", "U8", 1, kMatrix},
                                 {"scalar", "I64", 0, nullptr},
                                 {"empty", "BF16", 1, kNone}};
constexpr std::size_t kCount = 4;

// The agent's half of rk_publish_begin: lays the tensors out in one writable memory file and keeps
// it.
struct Room {
  UniqueFd file;
  Layout layout;
};

Room make_room(AgentEnd& agent) {
  agent.hello();
  const auto call = agent.expect(Kind::kPublishBegin);
  std::vector<TensorInfo> infos;
  for (const proto::PublishTensor& tensor : call.publish_begin().tensors()) {
    const std::vector<std::uint64_t> shape(tensor.shape().begin(), tensor.shape().end());
    infos.push_back({tensor.name(), *parse_dtype(tensor.dtype()), *Dims::from(shape)});
  }
  EXPECT_EQ(call.publish_begin().id().version(), 42u);
  auto tensors = *TensorSet::create(infos);
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(tensors[i].shape)});
  }
  Room room{UniqueFd(::memfd_create("room", MFD_CLOEXEC)),
            pack_layout(tensors, boxes, 1 << 30)->layout};
  const std::uint64_t bytes = room.layout.segments()[0].size_bytes;
  EXPECT_EQ(::ftruncate(room.file.get(), static_cast<off_t>(bytes)), 0);
  proto::AgentFrame frame;
  frame.set_session(kSession);
  frame.mutable_publish_begun()->set_layout(room.layout.serialize());
  frame.mutable_publish_begun()->add_segment_bytes(bytes);
  std::vector<UniqueFd> fds;
  fds.emplace_back(::dup(room.file.get()));
  agent.answer(call, frame, std::move(fds));
  return room;
}

rk_publication* begin(const Agent& agent) {
  rk_publication* publication = nullptr;
  rk_error error{};
  EXPECT_EQ(rk_publish_begin(agent.handle, "qwen3@42", kSpecs, kCount, &publication, &error), RK_OK)
      << error.message;
  return publication;
}

TEST(Publish, WhatWasWrittenIsThereWhenTheAgentCommits) {
  ScriptedAgent server([](AgentEnd& agent) {
    const Room room = make_room(agent);
    const auto commit = agent.expect(Kind::kPublishCommit);
    EXPECT_EQ(commit.session(), kSession);
    EXPECT_EQ(commit.deadline_ms(), static_cast<std::uint32_t>(kPatienceMs));
    for (const LayoutEntry& entry : room.layout.entries()) {
      // a, empty, scalar, z.
      const std::uint64_t sizes[] = {512, 0, 8, kMatrixBytes};
      const std::uint64_t size = sizes[entry.tensor];
      std::string found(size, '\0');
      ASSERT_EQ(
          ::pread(room.file.get(), found.data(), size, static_cast<off_t>(entry.offset_bytes)),
          static_cast<ssize_t>(size));
      EXPECT_EQ(found, std::string(size, static_cast<char>('A' + entry.tensor)));
    }
    proto::AgentFrame frame;
    frame.mutable_published()->mutable_id()->set_model("qwen3");
    agent.answer(commit, frame);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_publication* const publication = begin(agent);
  ASSERT_NE(publication, nullptr);
  // In the caller's order: z, a, scalar, empty.
  const char fill[] = {'D', 'A', 'C', 'B'};
  const std::uint64_t sizes[] = {kMatrixBytes, 512, 8, 0};
  for (std::size_t i = 0; i < kCount; ++i) {
    void* data = nullptr;
    std::uint64_t bytes = 77;
    ASSERT_EQ(rk_publish_data(publication, i, &data, &bytes, nullptr), RK_OK);
    ASSERT_EQ(bytes, sizes[i]);
    if (bytes > 0) std::memset(data, fill[i], bytes);
  }
  EXPECT_EQ(rk_publish_data(publication, kCount, nullptr, nullptr, nullptr), RK_INVALID);
  rk_error error{};
  EXPECT_EQ(rk_publish_commit(publication, kPatienceMs, &error), RK_OK) << error.message;
}

// No two parts of it are equal.
std::string numbered(std::uint64_t bytes) {
  std::string text;
  while (text.size() < bytes) text += fmt::format("{:016}", text.size());
  text.resize(bytes);
  return text;
}

// A publication whose bytes come through the threads of the library.
void copy_all_and_commit(std::function<void()> before_copies = [] {}) {
  ScriptedAgent server([](AgentEnd& agent) {
    const Room room = make_room(agent);
    const auto written = agent.expect(Kind::kPublishWritten);
    EXPECT_EQ(written.session(), kSession);
    EXPECT_EQ(written.publish_written().segment(), 0u);
    const LayoutEntry& z = room.layout.entries().back();
    std::string found(kMatrixBytes, '\0');
    ASSERT_EQ(
        ::pread(room.file.get(), found.data(), found.size(), static_cast<off_t>(z.offset_bytes)),
        static_cast<ssize_t>(found.size()));
    EXPECT_TRUE(found == numbered(kMatrixBytes));
    const auto commit = agent.expect(Kind::kPublishCommit);
    proto::AgentFrame frame;
    frame.mutable_published()->mutable_id()->set_model("qwen3");
    agent.answer(commit, frame);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_publication* const publication = begin(agent);
  ASSERT_NE(publication, nullptr);
  before_copies();
  rk_copies* copies = nullptr;
  rk_error error{};
  ASSERT_EQ(rk_copies_open(publication, 4, &copies, &error), RK_OK) << error.message;
  rk_copies* second = nullptr;
  EXPECT_EQ(rk_copies_open(publication, 2, &second, &error), RK_INVALID);
  const std::string source = numbered(kMatrixBytes);
  rk_copy list[kCount] = {};
  for (std::size_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(rk_publish_data(publication, i, &list[i].target, &list[i].bytes, nullptr), RK_OK);
  }
  list[0].source = source.data();
  // The others are written in place.
  std::memset(list[1].target, 'a', list[1].bytes);
  std::uint64_t number = 0;
  ASSERT_EQ(rk_copies_put(copies, list, 1, &number, &error), RK_OK) << error.message;
  // Not a second time, and no other memory.
  const rk_copy twice[] = {list[0], list[1]};
  EXPECT_EQ(rk_copies_put(copies, twice, 2, &number, &error), RK_INVALID);
  EXPECT_THAT(error.message, HasSubstr("each byte once"));
  std::string elsewhere(8, ' ');
  const rk_copy foreign{elsewhere.data(), source.data(), 8};
  EXPECT_EQ(rk_copies_put(copies, &foreign, 1, &number, &error), RK_INVALID);
  ASSERT_EQ(rk_copies_put(copies, list + 1, kCount - 1, &number, &error), RK_OK) << error.message;
  EXPECT_EQ(rk_copies_wait(copies, number, kPatienceMs, &error), RK_OK) << error.message;
  EXPECT_EQ(rk_publish_commit(publication, kPatienceMs, &error), RK_OK) << error.message;
  EXPECT_EQ(rk_copies_put(copies, list, 1, &number, &error), RK_STALE);
  rk_copies_close(copies);
}

TEST(Publish, ASegmentIsHandedOverWhenAllItsBytesHaveBeenCopied) { copy_all_and_commit(); }

// A write into the file ends in the middle of a tensor.
TEST(Publish, ATrainerWhoseFilesHaveALimitMayPublishMore) {
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  copy_all_and_commit([&] {
    const struct rlimit small { kMatrixBytes / 2, before.rlim_max };
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  });
  EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST(Publish, ARefusedCommitSaysWhy) {
  ScriptedAgent server([](AgentEnd& agent) {
    const Room room = make_room(agent);
    agent.fail(agent.expect(Kind::kPublishCommit), proto::STATUS_DENIED,
               "qwen3@42 exists with another root");
    const auto rest = agent.until_closed();
    EXPECT_TRUE(rest.empty()) << "it is over: nothing to abandon";
  });
  const Agent agent = connect_to(server.store());
  rk_error error{};
  EXPECT_EQ(rk_publish_commit(begin(agent), kPatienceMs, &error), RK_DENIED);
  EXPECT_STREQ(error.message, "qwen3@42 exists with another root");
}

TEST(Publish, AnAbandonedOneTellsTheAgent) {
  ScriptedAgent server([](AgentEnd& agent) {
    const Room room = make_room(agent);
    EXPECT_EQ(agent.expect(Kind::kPublishAbandon).session(), kSession);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_publish_abandon(begin(agent));
  rk_publish_abandon(nullptr);
}

TEST(Publish, AnAgentThatDiesBeforeTheCommitIsLost) {
  ScriptedAgent server([](AgentEnd& agent) {
    const Room room = make_room(agent);
    agent.expect(Kind::kPublishCommit);
    agent.close();
  });
  const Agent agent = connect_to(server.store());
  EXPECT_EQ(rk_publish_commit(begin(agent), kPatienceMs, nullptr), RK_PEER_LOST);
}

TEST(Publish, AnAnswerWithoutTheMemoryIsRefusedAndAbandoned) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kPublishBegin);
    proto::AgentFrame frame;
    frame.set_session(kSession);
    frame.mutable_publish_begun()->set_layout("nonsense");
    agent.answer(call, frame);
    EXPECT_EQ(agent.expect(Kind::kPublishAbandon).session(), kSession);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_publication* publication = nullptr;
  EXPECT_EQ(rk_publish_begin(agent.handle, "qwen3@42", kSpecs, kCount, &publication, nullptr),
            RK_INTERNAL);
  EXPECT_EQ(publication, nullptr);
}

TEST(Publish, WrongTensorsAreInvalidAndAskNobody) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    EXPECT_TRUE(agent.until_closed().empty());
  });
  const Agent agent = connect_to(server.store());
  const auto refused = [&](const char* version, rk_tensor_spec spec, std::size_t count = 1) {
    rk_publication* publication = nullptr;
    rk_error error{};
    EXPECT_EQ(rk_publish_begin(agent.handle, version, &spec, count, &publication, &error),
              RK_INVALID);
    EXPECT_EQ(publication, nullptr);
    return std::string(error.message);
  };
  EXPECT_THAT(refused("qwen3", kSpecs[0]), HasSubstr("which version"));
  refused("qwen3@42", kSpecs[0], 0);
  refused("qwen3@42", {nullptr, "F32", 2, kMatrix});
  refused("qwen3@42", {"w", "F33", 2, kMatrix});
  refused("qwen3@42", {"w", "F32", 2, nullptr});
  refused("qwen3@42", {"w", "F32", 99, kMatrix});
  refused("qwen3@42", {"", "F32", 2, kMatrix});
}

}  // namespace
}  // namespace rekindle::client::testing
