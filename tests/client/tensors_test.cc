// The tensors that a worker sees of a version: whole, as boxes and in pieces, and never wrong ones.
#include <fstream>
#include <map>
#include <span>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/worker.h"

namespace rekindle::client::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Kind = proto::WorkerFrame;

std::vector<std::string> names_of(const std::vector<rk_tensor>& tensors) {
  std::vector<std::string> names;
  for (const rk_tensor& tensor : tensors) names.emplace_back(tensor.name);
  return names;
}

// Permissions of the mapping at an address: "r--s".
std::string permissions_at(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::string line;
  while (std::getline(maps, line)) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char permissions[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, permissions) == 3 &&
        begin <= wanted && wanted < end) {
      return permissions;
    }
  }
  return "";
}

TEST(Tensors, AReadyVersionIsHandedOutWholeAndInPlace) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, true);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const std::vector<rk_tensor> tensors = all_tensors(session);
  EXPECT_THAT(names_of(tensors), UnorderedElementsAre("big", "empty", "scalar", "small", "wide"));
  for (const rk_tensor& tensor : tensors) {
    expect_bytes(model, tensor);
    EXPECT_EQ(*Dims::from({tensor.full_shape, tensor.dimensions}), box_of(tensor).extent);
    if (tensor.bytes > 0) {
      EXPECT_EQ(permissions_at(tensor.data), "r--s") << tensor.name;
    }
    if (std::string(tensor.name) == "big") {
      EXPECT_STREQ(tensor.dtype, "BF16");
    }
  }
  EXPECT_GT(model.layout().segments().size(), 1u);
}

TEST(Tensors, TheyComeAsTheirTilesDo) {
  const FakeModel model;
  Gate half, rest, others;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, false);
    const TileIndex begin = model.first_tile("big");
    const TileIndex end = model.end_tile("big");
    ASSERT_GT(end - begin, 2u);
    half.wait();
    agent.send(model.ready(kSession, begin + 1, end));
    // Tiles that come twice count once.
    agent.send(model.ready(kSession, begin + 1, end));
    agent.send(model.ready(kSession, model.first_tile("scalar"), model.end_tile("scalar")));
    rest.wait();
    agent.send(model.ready(kSession, begin, begin + 1));
    others.wait();
    proto::AgentFrame complete;
    complete.set_session(kSession);
    complete.mutable_ready()->set_complete(true);
    agent.send(complete);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  EXPECT_THAT(names_of(next(session).tensors), UnorderedElementsAre("empty"));
  const Batch none = next(session, 0);
  EXPECT_EQ(none.code, RK_TIMEOUT);
  EXPECT_THAT(none.message, HasSubstr("1 of 5"));
  half.open();
  EXPECT_THAT(names_of(next(session).tensors), UnorderedElementsAre("scalar"));
  EXPECT_EQ(next(session, 0).code, RK_TIMEOUT) << "big lacks one tile";
  rest.open();
  const Batch big = next(session);
  ASSERT_THAT(names_of(big.tensors), UnorderedElementsAre("big"));
  expect_bytes(model, big.tensors[0]);
  rk_session_info info{};
  info.size = sizeof info;
  ASSERT_EQ(rk_info(session.handle, &info, nullptr), RK_OK);
  EXPECT_EQ(info.bytes_done, (2u << 20) + 8);
  EXPECT_EQ(info.bytes_total, (2u << 20) + 8 + 16 * 32 * 4 + 3 * 70'000);
  others.open();
  EXPECT_THAT(names_of(all_tensors(session)), UnorderedElementsAre("small", "wide"));
  EXPECT_TRUE(next(session, 0).tensors.empty()) << "there are no more";
}

// An agent that answers an attach with these boxes.
ScriptedAgent::Script wanting(const FakeModel& model, std::vector<TensorBox> boxes) {
  return [&model, boxes = std::move(boxes)](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kAttach);
    proto::AgentFrame frame = model.attached(call.call(), kSession, true);
    for (const TensorBox& box : boxes) {
      proto::WantedBox& wanted = *frame.mutable_attached()->add_wanted();
      wanted.set_tensor(model.tensors()[box.tensor].name);
      for (const auto value : box.box.offset.span()) wanted.add_offset(value);
      for (const auto value : box.box.extent.span()) wanted.add_extent(value);
    }
    agent.send(frame, model.segments());
    agent.until_closed();
  };
}

TEST(Tensors, BoxesAreInPlaceWhereTheyLieContiguously) {
  const FakeModel model;
  const TensorIndex big = *model.tensors().find("big");
  ScriptedAgent server(wanting(model, {{big, {{100, 0}, {50, 1024}}},       // rows
                                       {big, {{200, 512}, {1, 256}}},       // of one row
                                       {big, {{300, 512}, {400, 256}}}}));  // columns
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const std::vector<rk_tensor> tensors = all_tensors(session);
  ASSERT_EQ(tensors.size(), 3u);
  for (const rk_tensor& tensor : tensors) {
    expect_bytes(model, tensor);
    EXPECT_EQ(tensor.full_shape[0], 1024u);
    const bool columns = tensor.shape[0] == 400;
    EXPECT_EQ(permissions_at(tensor.data), columns ? "rw-p" : "r--s");
  }
}

TEST(Tensors, OfTheWholeVersionAreListedWhateverTheSessionHas) {
  const FakeModel model;
  ScriptedAgent server(wanting(model, {{*model.tensors().find("big"), {{100, 0}, {50, 1024}}}}));
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const rk_tensor* tensors = nullptr;
  std::size_t count = 0;
  ASSERT_EQ(rk_catalog(session.handle, &tensors, &count, nullptr), RK_OK);
  ASSERT_EQ(count, model.tensors().size());
  for (std::size_t i = 0; i < count; ++i) {
    const TensorInfo& info = model.tensors().tensors()[i];
    EXPECT_EQ(tensors[i].name, info.name);
    EXPECT_EQ(tensors[i].dtype, dtype_name(info.dtype));
    EXPECT_EQ(*Dims::from({tensors[i].shape, tensors[i].dimensions}), info.shape);
    EXPECT_EQ(*Dims::from({tensors[i].full_shape, tensors[i].dimensions}), info.shape);
    EXPECT_EQ(*Dims::from({tensors[i].offset, tensors[i].dimensions}),
              Dims::zeros(info.shape.rank()));
    EXPECT_EQ(tensors[i].bytes, info.shape.product() * dtype_size_bytes(info.dtype));
    EXPECT_EQ(tensors[i].data, nullptr);
    EXPECT_EQ(tensors[i].full_shape, tensors[i].shape) << "equal lists are one";
  }
}

TEST(Tensors, EqualShapesAndOffsetsOfAnArrayAreAtOneAddress) {
  std::vector<TensorInfo> infos;
  for (const char* const name : {"a", "b", "c"}) infos.push_back({name, DType::kU8, {2, 3}});
  infos.push_back({"d", DType::kU8, {2, 3, 1}});
  infos.push_back({"e", DType::kU8, {}});
  infos.push_back({"f", DType::kU8, {3, 2}});
  const FakeModel model(infos, {}, 1 << 20);
  ScriptedAgent server(wanting(model, {}));
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const rk_tensor* tensors = nullptr;
  std::size_t count = 0;
  ASSERT_EQ(rk_tensors(session.handle, &tensors, &count, nullptr), RK_OK);
  ASSERT_EQ(count, infos.size());
  std::map<std::vector<std::uint64_t>, const std::uint64_t*> address;
  for (const rk_tensor& tensor : std::span(tensors, count)) {
    for (const std::uint64_t* const list : {tensor.shape, tensor.offset, tensor.full_shape}) {
      const std::vector<std::uint64_t> values(list, list + tensor.dimensions);
      EXPECT_EQ(address.try_emplace(values, list).first->second, list) << tensor.name;
    }
  }
  EXPECT_EQ(address.size(), 6u);
}

TEST(Tensors, ABoxThatTheAgentHoldsInPartsIsPutTogether) {
  const std::vector<TensorInfo> info = {{"w", DType::kF32, Shape{64, 256}}};
  const FakeModel model(info, {{0, {{0, 0}, {64, 128}}}, {0, {{0, 128}, {64, 128}}}}, 1 << 20);
  ScriptedAgent server(wanting(model, {{0, {{8, 100}, {40, 60}}}, {0, {{0, 0}, {64, 256}}}}));
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const std::vector<rk_tensor> tensors = all_tensors(session);
  ASSERT_EQ(tensors.size(), 2u);
  for (const rk_tensor& tensor : tensors) expect_bytes(model, tensor);
}

TEST(Tensors, ALayoutOfManyTensorsArrivesInALargeFrame) {
  std::vector<TensorInfo> infos;
  for (int i = 0; i < 30'000; ++i) {
    infos.push_back({fmt::format("model.layers.{}.mlp.experts.weight", i), DType::kU8, Shape{1}});
  }
  const FakeModel model(infos, {}, std::uint64_t{1} << 30);
  ASSERT_GT(model.attached(1, kSession, true).ByteSizeLong(), ipc::kMaxFrameBytes);
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.attach(model, true);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const Session session = attach_to(agent);
  const std::vector<rk_tensor> tensors = all_tensors(session);
  EXPECT_EQ(tensors.size(), infos.size());
  for (const rk_tensor& tensor : tensors) {
    ASSERT_EQ(*static_cast<const std::uint8_t*>(tensor.data), byte_of(tensor.name, 0));
  }
}

// An answer whose parts do not fit together is an error, and the agent is told to drop the session.
void expect_refused(const std::function<void(proto::AgentFrame&, std::vector<UniqueFd>&)>& spoil,
                    const std::string& why) {
  SCOPED_TRACE(why);
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kAttach);
    proto::AgentFrame frame = model.attached(call.call(), kSession, true);
    std::vector<UniqueFd> segments = model.segments();
    spoil(frame, segments);
    agent.send(frame, std::move(segments));
    EXPECT_EQ(agent.expect(Kind::kDetach).session(), kSession);
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const rk_attach_options options = attach_options();
  rk_session* session = nullptr;
  rk_error error{};
  EXPECT_EQ(rk_attach(agent.handle, &options, &session, &error), RK_INTERNAL) << error.message;
  EXPECT_THAT(error.message, HasSubstr(why));
  EXPECT_EQ(session, nullptr);
}

TEST(Tensors, AnAnswerThatDoesNotFitTogetherIsRefused) {
  using Frame = proto::AgentFrame;
  using Files = std::vector<UniqueFd>;
  expect_refused([](Frame& frame, Files&) { frame.mutable_attached()->set_layout("nonsense"); },
                 "layout");
  expect_refused([](Frame& frame, Files&) { frame.mutable_attached()->set_tensor_set("nonsense"); },
                 "does not fit together");
  expect_refused([](Frame&, Files& files) { files.pop_back(); }, "descriptors for");
  expect_refused(
      [](Frame& frame, Files& files) {
        frame.mutable_attached()->clear_segment_bytes();
        files.clear();
      },
      "segments for a layout");
  expect_refused([](Frame& frame, Files&) { frame.mutable_attached()->set_segment_bytes(0, 7); },
                 "the agent sent 7");
  expect_refused(
      [](Frame& frame, Files&) { frame.mutable_attached()->mutable_ready()->set_end(0, 1 << 30); },
      "tiles 0 to");
  expect_refused(
      [](Frame& frame, Files&) { frame.mutable_attached()->add_wanted()->set_tensor("other"); },
      "'other'");
}

TEST(Tensors, ASegmentThatIsShorterThanItsLayoutIsRefused) {
  const FakeModel model;
  ScriptedAgent server([&](AgentEnd& agent) {
    agent.hello();
    const auto call = agent.expect(Kind::kAttach);
    std::vector<UniqueFd> segments = model.segments();
    segments[0].reset(::memfd_create("short", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(segments[0].get(), 4096), 0);
    agent.send(model.attached(call.call(), kSession, true), std::move(segments));
    agent.until_closed();
  });
  const Agent agent = connect_to(server.store());
  const rk_attach_options options = attach_options();
  rk_session* session = nullptr;
  rk_error error{};
  EXPECT_EQ(rk_attach(agent.handle, &options, &session, &error), RK_INTERNAL);
  EXPECT_THAT(error.message, HasSubstr("came as a file of 4096"));
}

}  // namespace
}  // namespace rekindle::client::testing
