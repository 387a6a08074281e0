// Requests to the agent, and the effects of its answers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/worker.h"

namespace rekindle::client::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = proto::WorkerFrame;

TEST(Attach, EverythingThatIsAskedReachesTheAgent) {
  const FakeModel model;
  proto::WorkerFrame asked;
  Gate noted;
  ScriptedAgent server([&](AgentEnd& agent) {
    asked = agent.attach(model, true);
    noted.open();
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const std::uint64_t offset[] = {0, 128};
  const std::uint64_t extent[] = {512, 128};
  const rk_box boxes[] = {{"big", 2, offset, extent}, {"small", 0, nullptr, nullptr}};
  rk_attach_options options = attach_options("qwen3");
  options.spec_json = "{}";
  options.boxes = boxes;
  options.box_count = 2;
  options.instance = "blue";
  options.generation = 5;
  options.rank = 3;
  options.world = 8;
  options.fallback_dir = "/models/qwen3";
  options.timeout_ms = 9000;
  Session session;
  ASSERT_EQ(rk_attach(agent.handle, &options, &session.handle, nullptr), RK_OK);
  noted.wait();
  EXPECT_EQ(asked.deadline_ms(), 9000u);
  const proto::AttachRequest& request = asked.attach();
  EXPECT_EQ(request.model(), "qwen3");
  EXPECT_TRUE(request.latest());
  EXPECT_EQ(request.spec_json(), "{}");
  EXPECT_EQ(request.instance(), "blue");
  EXPECT_EQ(request.generation(), 5u);
  EXPECT_EQ(request.rank(), 3u);
  EXPECT_EQ(request.world(), 8u);
  EXPECT_EQ(request.fallback_dir(), "/models/qwen3");
  ASSERT_EQ(request.boxes_size(), 2);
  EXPECT_EQ(request.boxes(0).tensor(), "big");
  EXPECT_THAT(request.boxes(0).offset(), ElementsAre(0, 128));
  EXPECT_THAT(request.boxes(0).extent(), ElementsAre(512, 128));
  EXPECT_EQ(request.boxes(1).tensor(), "small");
  EXPECT_EQ(request.boxes(1).offset_size(), 0);
}

TEST(Attach, AVersionAndAShardReachTheAgent) {
  const FakeModel model;
  proto::WorkerFrame asked;
  Gate noted;
  ScriptedAgent server([&](AgentEnd& agent) {
    asked = agent.attach(model, true);
    noted.open();
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_attach_options options = attach_options("qwen3@41");
  options.shard = "tp=3/8";
  Session session;
  ASSERT_EQ(rk_attach(agent.handle, &options, &session.handle, nullptr), RK_OK);
  noted.wait();
  EXPECT_FALSE(asked.attach().latest());
  EXPECT_EQ(asked.attach().version(), 41u);
  EXPECT_EQ(asked.attach().shard(), "tp=3/8");
  EXPECT_EQ(asked.attach().world(), 1u);
  rk_session_info info{};
  info.size = sizeof info;
  ASSERT_EQ(rk_info(session.handle, &info, nullptr), RK_OK);
  EXPECT_STREQ(info.model, "qwen3");
  EXPECT_EQ(info.version, 41u);
  EXPECT_EQ(info.tensors, 5u);
  EXPECT_STREQ(info.rung, "local");
}

TEST(Attach, ASessionThatFallsToAnotherRungSaysSo) {
  const FakeModel model;
  Gate asked;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    agent.answer_pings_until(asked);
    proto::AgentFrame last = model.ready(7, 0, model.tiles().tile_count());
    last.mutable_ready()->set_rung("fallback");
    last.mutable_ready()->set_complete(true);
    agent.send(std::move(last));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  rk_session_info before{};
  before.size = sizeof before;
  ASSERT_EQ(rk_info(session.handle, &before, nullptr), RK_OK);
  asked.open();
  EXPECT_EQ(all_tensors(session).size(), 5u);
  rk_session_info after{};
  after.size = sizeof after;
  ASSERT_EQ(rk_info(session.handle, &after, nullptr), RK_OK);
  EXPECT_STREQ(after.rung, "fallback");
  EXPECT_STREQ(before.rung, "local") << "what was handed out lives on";
}

TEST(Attach, WrongOptionsAreInvalidAndAskNobody) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    EXPECT_TRUE(agent.until_closed().empty());
  });
  const Agent agent = connect_to(server.store());
  const rk_box box{"big", 0, nullptr, nullptr};
  const rk_box nameless{nullptr, 0, nullptr, nullptr};
  const rk_box placeless{"big", 2, nullptr, nullptr};
  const rk_box deep{"big", 9, nullptr, nullptr};
  const auto refused = [&](const std::function<void(rk_attach_options&)>& spoil) {
    rk_attach_options options = attach_options();
    spoil(options);
    rk_session* session = nullptr;
    rk_error error{};
    EXPECT_EQ(rk_attach(agent.handle, &options, &session, &error), RK_INVALID);
    EXPECT_EQ(error.code, RK_INVALID);
    EXPECT_EQ(session, nullptr);
    return std::string(error.message);
  };
  EXPECT_THAT(refused([](auto& o) { o.model = nullptr; }), HasSubstr("model"));
  refused([](auto& o) { o.model = "qwen3@"; });
  EXPECT_THAT(refused([](auto& o) { o.size = 1; }), HasSubstr("size"));
  EXPECT_THAT(refused([](auto& o) { o.rank = 8, o.world = 8; }), HasSubstr("rank 8"));
  EXPECT_THAT(refused([](auto& o) { o.timeout_ms = -1; }), HasSubstr("-1"));
  EXPECT_THAT(refused([](auto& o) { o.box_count = 1; }), HasSubstr("null"));
  EXPECT_THAT(refused([&](auto& o) { o.boxes = &box, o.box_count = 1, o.shard = "tp=0/2"; }),
              HasSubstr("which one"));
  refused([&](auto& o) { o.boxes = &nameless, o.box_count = 1; });
  refused([&](auto& o) { o.boxes = &placeless, o.box_count = 1; });
  EXPECT_THAT(refused([&](auto& o) { o.boxes = &deep, o.box_count = 1; }), HasSubstr("9 dim"));
}

TEST(Attach, TheAgentsRefusalIsPassedOn) {
  ScriptedAgent server([](AgentEnd& agent) {
    agent.hello();
    agent.fail(agent.expect(Kind::kAttach), proto::STATUS_NOT_FOUND, "nobody holds layers.3.w");
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const rk_attach_options options = attach_options();
  rk_session* session = nullptr;
  rk_error error{};
  EXPECT_EQ(rk_attach(agent.handle, &options, &session, &error), RK_NOT_FOUND);
  EXPECT_EQ(error.code, RK_NOT_FOUND);
  EXPECT_STREQ(error.message, "attach qwen3@41: nobody holds layers.3.w");
}

TEST(Attach, AnAnswerThatComesTooLateIsUndone) {
  const FakeModel model;
  Gate gave_up, undone;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kAttach);
    gave_up.wait();
    agent.send(model.attached(call.call(), kSession, true), model.segments());
    EXPECT_EQ(agent.expect(Kind::kDetach).session(), kSession);
    undone.open();
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  rk_attach_options options = attach_options();
  options.timeout_ms = 1;
  rk_session* session = nullptr;
  EXPECT_EQ(rk_attach(agent.handle, &options, &session, nullptr), RK_TIMEOUT);
  gave_up.open();
  // Before the connection closes.
  undone.wait();
}

TEST(Attach, LoadedCommitsWhenTheAgentSaysSo) {
  const FakeModel model;
  Gate others_loaded;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, true);
    const auto loaded = agent.expect(Kind::kLoaded);
    EXPECT_EQ(loaded.session(), kSession);
    EXPECT_EQ(loaded.loaded().bytes(), model.layout().payload_bytes());
    others_loaded.wait();
    agent.commit(loaded);
    const auto rest = agent.until_closed();
    ASSERT_EQ(rest.size(), 1u) << "the second rk_loaded asks nobody";
    EXPECT_EQ(rest[0].kind_case(), Kind::kDetach);
  });
  const Agent agent = connect_to(server.store());
  {
    const Session session = attach_to(agent);
    rk_error error{};
    EXPECT_EQ(rk_loaded(session.handle, &error), RK_INVALID);
    EXPECT_THAT(error.message, HasSubstr("5 of 5 tensors"));
    EXPECT_EQ(rk_wait_commit(session.handle, 0, &error), RK_INVALID);
    all_tensors(session);
    EXPECT_EQ(rk_loaded(session.handle, &error), RK_OK) << error.message;
    EXPECT_EQ(rk_loaded(session.handle, &error), RK_OK);
    EXPECT_EQ(rk_wait_commit(session.handle, 0, &error), RK_TIMEOUT);
    EXPECT_EQ(rk_wait_commit(session.handle, 5, &error), RK_TIMEOUT);
    others_loaded.open();
    EXPECT_EQ(rk_wait_commit(session.handle, kPatienceMs, &error), RK_OK) << error.message;
    EXPECT_EQ(rk_wait_commit(session.handle, 0, &error), RK_OK);
  }
}

TEST(Attach, AfterARankFailedTheOthersWaitAgainWithoutLoading) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, true);
    agent.fail(agent.expect(Kind::kLoaded), proto::STATUS_UNAVAILABLE, "rank 3 died while loading");
    agent.commit(agent.expect(Kind::kLoaded));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  all_tensors(session);
  rk_error error{};
  ASSERT_EQ(rk_loaded(session.handle, &error), RK_OK);
  EXPECT_EQ(rk_wait_commit(session.handle, kPatienceMs, &error), RK_UNAVAILABLE);
  EXPECT_STREQ(error.message, "rank 3 died while loading");
  EXPECT_EQ(rk_wait_commit(session.handle, kPatienceMs, &error), RK_OK) << error.message;
}

TEST(Attach, ANewVersionIsToldOnceItIsThere) {
  const FakeModel model;
  Gate published;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, true);
    const auto watch = agent.expect(Kind::kWatch);
    EXPECT_EQ(watch.watch().have().model(), "qwen3");
    EXPECT_EQ(watch.watch().have().version(), 41u);
    published.wait();
    proto::AgentFrame frame;
    frame.mutable_new_version()->mutable_id()->set_model("qwen3");
    frame.mutable_new_version()->mutable_id()->set_version(42);
    agent.answer(watch, frame);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  std::uint64_t version = 0;
  EXPECT_EQ(rk_wait_update(session.handle, 0, &version, nullptr), RK_TIMEOUT);
  published.open();
  EXPECT_EQ(rk_wait_update(session.handle, kPatienceMs, &version, nullptr), RK_OK);
  EXPECT_EQ(version, 42u);
  EXPECT_EQ(rk_wait_update(session.handle, 0, nullptr, nullptr), RK_OK);
}

TEST(Attach, ASessionThatTheAgentEndsSaysWhy) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    agent.end_session(kSession, proto::STATUS_CORRUPT, "tile 3 of big does not verify anywhere");
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  Batch batch;
  // "empty" may come first.
  do batch = next(session);
  while (batch.code == RK_OK && !batch.tensors.empty());
  EXPECT_EQ(batch.code, RK_CORRUPT);
  EXPECT_EQ(batch.message, "tile 3 of big does not verify anywhere");
  EXPECT_EQ(rk_wait_update(session.handle, 0, nullptr, nullptr), RK_CORRUPT);
}

TEST(Attach, AnAgentOfAnotherProtocolIsRefused) {
  ScriptedAgent server([](AgentEnd& agent) {
    const auto call = agent.expect(Kind::kHello);
    EXPECT_EQ(call.hello().protocol_min(), 1u);
    EXPECT_THAT(call.hello().software(), HasSubstr("librekindle "));
    EXPECT_EQ(call.hello().pid(), static_cast<std::uint32_t>(::getpid()));
    proto::AgentFrame frame;
    frame.mutable_hello()->set_protocol(2);
    agent.answer(call, frame);
    agent.until_closed();
  });
  const rk_connect_options options{sizeof options, server.store().c_str(), kPatienceMs};
  rk_agent* agent = nullptr;
  rk_error error{};
  EXPECT_EQ(rk_connect(&options, &agent, &error), RK_INVALID);
  EXPECT_THAT(error.message, HasSubstr("version 2"));
  EXPECT_EQ(agent, nullptr);
}

}  // namespace
}  // namespace rekindle::client::testing
