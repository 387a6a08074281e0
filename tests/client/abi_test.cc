// The edges of the ABI: versions, sizes, nulls, texts, fork().
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "src/ipc/standby.h"
#include "tests/client/worker.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Kind = proto::WorkerFrame;

TEST(Abi, NamesAndVersions) {
  EXPECT_EQ(rk_api_version(), static_cast<std::uint32_t>(RK_API_VERSION));
  EXPECT_THAT(rk_library_version(), ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
  EXPECT_STREQ(rk_code_name(RK_OK), "OK");
  EXPECT_STREQ(rk_code_name(RK_INVALID), "INVALID");
  EXPECT_STREQ(rk_code_name(RK_PEER_LOST), "PEER_LOST");
  EXPECT_STREQ(rk_code_name(RK_INTERNAL), "INTERNAL");
  EXPECT_STREQ(rk_code_name(11), "UNKNOWN");
  EXPECT_STREQ(rk_code_name(-1), "UNKNOWN");
}

TEST(Abi, AProcessThatIsNoStandbyDoesNotWait) {
  rk_error error{};
  std::uint32_t failures = 7;
  EXPECT_EQ(rk_wait_standby(0, &failures, &error), RK_OK) << error.message;
  EXPECT_EQ(failures, 0u);
  EXPECT_EQ(rk_wait_standby(0, nullptr, nullptr), RK_OK);
  EXPECT_EQ(rk_wait_standby(-1, &failures, &error), RK_INVALID);
}

TEST(Abi, AStandbyWaitsForItsTurn) {
  const std::string name = "rekindle-standby-abi-" + std::to_string(::getpid());
  ASSERT_EQ(::setenv(ipc::kStandbyVariable, name.c_str(), 1), 0);
  rk_error error{};
  std::uint32_t failures = 7;
  EXPECT_EQ(rk_wait_standby(0, &failures, &error), RK_UNAVAILABLE);
  EXPECT_THAT(error.message, HasSubstr("`rekindle run` that started it has ended"));
  rk_agent* agent = nullptr;
  EXPECT_EQ(rk_connect(nullptr, &agent, &error), RK_UNAVAILABLE);
  EXPECT_THAT(error.message, HasSubstr("`rekindle run` that started it has ended"));

  const auto address = ipc::abstract_address(name);
  ASSERT_TRUE(address);
  const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), address->generic(), address->size), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  EXPECT_EQ(rk_wait_standby(1, &failures, &error), RK_TIMEOUT);
  const UniqueFd timed_out(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  std::thread run([&] {
    const UniqueFd waiter(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::string turn = ipc::turn_text({{"REKINDLE_FAILURES", "3"}, {"OTHER", "a=b"}});
    EXPECT_EQ(::write(waiter.get(), turn.data(), turn.size()), static_cast<ssize_t>(turn.size()));
  });
  EXPECT_EQ(rk_wait_standby(60'000, &failures, &error), RK_OK) << error.message;
  EXPECT_EQ(failures, 3u);
  run.join();
  ::unsetenv(ipc::kStandbyVariable);
}

TEST(Abi, NullsAreInvalidOrNothing) {
  rk_error error{};
  EXPECT_EQ(rk_connect(nullptr, nullptr, &error), RK_INVALID);
  EXPECT_EQ(error.code, RK_INVALID);
  EXPECT_NE(error.message[0], '\0');
  EXPECT_EQ(rk_connect(nullptr, nullptr, nullptr), RK_INVALID);
  rk_session* session = nullptr;
  EXPECT_EQ(rk_attach(nullptr, nullptr, &session, &error), RK_INVALID);
  EXPECT_EQ(rk_next(nullptr, 0, nullptr, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_info(nullptr, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_tensors(nullptr, nullptr, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_tensor_count(nullptr, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_catalog(nullptr, nullptr, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_next_bucket(nullptr, 0, nullptr, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_load_into(nullptr, nullptr, 0, 0, &error), RK_INVALID);
  EXPECT_EQ(rk_stage(nullptr, 0, 0, &error), RK_INVALID);
  EXPECT_EQ(rk_begin_switch(nullptr, 0, &error), RK_INVALID);
  EXPECT_EQ(rk_report_phases(nullptr, nullptr, 0, &error), RK_INVALID);
  EXPECT_EQ(rk_loaded(nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_wait_commit(nullptr, 0, &error), RK_INVALID);
  EXPECT_EQ(rk_wait_update(nullptr, 0, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_publish_begin(nullptr, nullptr, nullptr, 0, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_publish_data(nullptr, 0, nullptr, nullptr, &error), RK_INVALID);
  EXPECT_EQ(rk_publish_commit(nullptr, 0, &error), RK_INVALID);
  EXPECT_EQ(rk_update(nullptr, nullptr, nullptr, &error), RK_INVALID);
  rk_disconnect(nullptr);
  rk_detach(nullptr);
  rk_publish_abandon(nullptr);
}

TEST(Abi, StructuresOfOtherReleasesAreUnderstood) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    for (std::uint64_t session = 1; session <= 2; ++session) {
      const auto call = agent.expect(Kind::kAttach);
      EXPECT_EQ(call.attach().world(), 1u);
      agent.send(model.attached(call.call(), session, true), model.segments());
    }
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  // An older caller knows `size` and `model` only; the library must not read the memory behind
  // them.
  alignas(rk_attach_options) unsigned char memory[sizeof(rk_attach_options) + 16];
  std::memset(memory, 0xee, sizeof memory);
  const auto put = [&](std::uint32_t size) {
    rk_attach_options head{};
    head.size = size;
    head.model = "qwen3@41";
    std::memcpy(memory, &head, std::min<std::size_t>(size, sizeof head));
    return reinterpret_cast<const rk_attach_options*>(memory);
  };
  Session old_one;
  EXPECT_EQ(
      rk_attach(agent.handle, put(offsetof(rk_attach_options, shard)), &old_one.handle, nullptr),
      RK_OK);
  // A newer caller has fields that this library does not know. They must be 0.
  Session new_one;
  rk_error error{};
  EXPECT_EQ(rk_attach(agent.handle, put(sizeof memory), &new_one.handle, &error), RK_INVALID);
  EXPECT_THAT(error.message, HasSubstr("does not know"));
  std::memset(memory + sizeof(rk_attach_options), 0, 16);
  EXPECT_EQ(rk_attach(agent.handle, put(sizeof memory), &new_one.handle, &error), RK_OK)
      << error.message;

  rk_session_info info;
  std::memset(&info, 0xee, sizeof info);
  info.size = offsetof(rk_session_info, bytes_done);
  ASSERT_EQ(rk_info(old_one.handle, &info, nullptr), RK_OK);
  EXPECT_EQ(info.version, 41u);
  EXPECT_EQ(info.bytes_done, 0xeeeeeeeeeeeeeeeeu) << "beyond the caller's structure";
}

TEST(Abi, CallersFromBeforeDevicesGoOnWorking) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kAttach);
    EXPECT_EQ(call.attach().device(), "");
    EXPECT_EQ(call.attach().bucket_bytes(), 0u);
    agent.send(model.attached(call.call(), kSession, true), model.segments());
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_attach_options options;
  // An old caller has other data behind its structure.
  std::memset(&options, 0xee, sizeof options);
  const rk_attach_options meant = attach_options();
  constexpr std::size_t kOldOptions = offsetof(rk_attach_options, device);
  std::memcpy(&options, &meant, kOldOptions);
  options.size = kOldOptions;
  Session session;
  rk_error error{};
  ASSERT_EQ(rk_attach(agent.handle, &options, &session.handle, &error), RK_OK) << error.message;
  rk_session_info info;
  std::memset(&info, 0xee, sizeof info);
  info.size = offsetof(rk_session_info, device_path);
  ASSERT_EQ(rk_info(session.handle, &info, nullptr), RK_OK);
  EXPECT_STREQ(info.rung, "local");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(info.device_path), 0xeeeeeeeeeeeeeeeeu);
  EXPECT_EQ(all_tensors(session).size(), 5u);
}

TEST(Abi, CallersFromBeforeGroupsGoOnWorking) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kAttach);
    EXPECT_EQ(call.attach().group(), "");
    agent.send(model.attached(call.call(), kSession, true), model.segments());
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_attach_options options;
  // An old caller has other data behind its structure.
  std::memset(&options, 0xee, sizeof options);
  const rk_attach_options meant = attach_options();
  constexpr std::size_t kOldOptions = offsetof(rk_attach_options, group);
  std::memcpy(&options, &meant, kOldOptions);
  options.size = kOldOptions;
  Session session;
  rk_error error{};
  ASSERT_EQ(rk_attach(agent.handle, &options, &session.handle, &error), RK_OK) << error.message;
}

TEST(Abi, LongTextsAreCutAtACharacterAndStayOneLine) {
  std::string text = "first\nline ";
  while (text.size() < 3000) text += "\xe2\x82\xac";  // three bytes each
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    for (int i = 0; i < 3; ++i) {
      agent.fail(agent.expect(Kind::kAttach), proto::STATUS_NOT_FOUND,
                 text.substr(std::size_t(3 * i)));
    }
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  for (const char* const model : {"m@1", "mm@1", "mmm@1"}) {  // every alignment of the cut
    const rk_attach_options options = attach_options(model);
    rk_session* session = nullptr;
    rk_error error{};
    ASSERT_EQ(rk_attach(agent.handle, &options, &session, &error), RK_NOT_FOUND);
    const std::string message = error.message;
    EXPECT_GE(message.size(), sizeof error.message - 3);
    EXPECT_EQ(message.find('\n'), std::string::npos);
    EXPECT_TRUE(message.ends_with("\xe2\x82\xac"));
  }
}

// Runs `body` in a child and returns its result, the exit status of the child.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(Abi, AfterForkOnlyTheParentUsesWhatItOpened) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, true);
    const auto rest = agent.until_closed();
    ASSERT_EQ(rest.size(), 2u) << "nothing of the child's";
    EXPECT_EQ(rest[0].kind_case(), Kind::kWatch);
    EXPECT_EQ(rest[1].kind_case(), Kind::kDetach);
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const std::vector<rk_tensor> tensors = all_tensors(session);
  EXPECT_EQ(in_child([&] {
              rk_error error{};
              if (rk_next(session.handle, 0, nullptr, nullptr, &error) != RK_INVALID) return 1;
              if (std::strstr(error.message, "fork") == nullptr) return 2;
              const rk_attach_options options = attach_options();
              rk_session* mine = nullptr;
              if (rk_attach(agent.handle, &options, &mine, nullptr) != RK_INVALID) return 3;
              // Mapped tensors stay readable.
              for (const rk_tensor& tensor : tensors) {
                if (bytes_of(tensor) != model.bytes_of(tensor.name, box_of(tensor))) return 4;
              }
              rk_detach(session.handle);
              rk_disconnect(agent.handle);
              return 0;
            }),
            0);
  EXPECT_EQ(rk_wait_update(session.handle, 0, nullptr, nullptr), RK_TIMEOUT)
      << "the parent goes on";
}

}  // namespace
}  // namespace rekindle::client::testing
