#include "recovery/worker/portion.h"

#include <fstream>
#include <limits>

#include "recovery/rpc/convert.h"
#include "recovery/worker/worker_wire.h"
#include "tests/store/store_fixture.h"

namespace rekindle::worker {
namespace {

class PortionTest : public store::StoreTest {
 protected:
  Copies copies() const { return source_store_->find(id_); }
  Wanted whole() const { return {id_, "", "", {}, "", ""}; }
  // The copy has the tensor in one piece, but the wanted part of it is not contiguous.
  Wanted strided() const {
    Wanted wanted = whole();
    wanted.boxes.push_back({"embed.weight", {0, 0}, {1000, 256}});
    return wanted;
  }
};

TEST_F(PortionTest, TheFrameIsWhatProtobufWouldWrite) {
  const auto found = find_portion(copies(), strided());
  ASSERT_TRUE(found) << found.error().message();
  ASSERT_NE(found->stored, nullptr);
  const AttachedTo own{300, 7, Rung::kAdopted, 3, true, "because"};
  proto::AgentFrame frame;
  ASSERT_TRUE(frame.ParseFromString(attached_frame(own, found->portion->encoded)));
  EXPECT_EQ(frame.call(), 300u);
  EXPECT_EQ(frame.session(), 7u);
  EXPECT_EQ(frame.descriptors(), 3u);
  const proto::Attached& attached = frame.attached();
  const Manifest& manifest = found->stored->manifest;
  EXPECT_EQ(attached.id().model(), id_.model);
  EXPECT_EQ(attached.id().version(), id_.version);
  EXPECT_EQ(attached.root().SerializeAsString(),
            rpc::to_proto(manifest.checkpoint->root).SerializeAsString());
  EXPECT_EQ(attached.layout(), manifest.layout.serialize());
  EXPECT_EQ(attached.tensor_set(), manifest.checkpoint->tensors.serialize());
  EXPECT_EQ(attached.segment_bytes_size(), static_cast<int>(manifest.layout.segments().size()));
  ASSERT_EQ(attached.wanted_size(), 1);
  EXPECT_EQ(attached.wanted(0).tensor(), "embed.weight");
  EXPECT_THAT(attached.wanted(0).extent(), ::testing::ElementsAre(1000, 256));
  EXPECT_EQ(attached.rung(), to_string(Rung::kAdopted));
  EXPECT_TRUE(attached.device_channel());
  EXPECT_EQ(attached.no_device_channel(), "because");
  EXPECT_EQ(found->portion->payload_bytes, 1000u * 256 * 2);
}

TEST_F(PortionTest, ABoxWithoutANameIsTheSmallestTensor) {
  Wanted wanted = whole();
  wanted.boxes.push_back({"", {}, {}});
  const auto found = find_portion(copies(), wanted);
  ASSERT_TRUE(found) << found.error().message();
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (const TensorInfo& tensor : checkpoint()->tensors.tensors()) {
    if (tensor.size_bytes() > 0) least = std::min(least, tensor.size_bytes());
  }
  ASSERT_LT(least, 1u << 20);
  EXPECT_EQ(found->portion->payload_bytes, least);
}

TEST_F(PortionTest, B4AConfigThatDoesNotMatchItsDigestChoosesNoBoxes) {
  store::write_bytes(source_path() / "config.json", R"({"n":4})");
  const ModelVersion id{id_.model, id_.version + 1};
  ASSERT_TRUE(store::publish(*source_store_, id, source_path()));
  Wanted half{id, "tp=1/2", "", {}, "", ""};
  half.spec_json = R"({"name": "test", "rules": [
    {"match": "lm_head.weight", "kind": "heads", "dim": 0, "heads": "n"},
    {"match": "**", "kind": "replicate"}]})";
  const auto found = [&] { return find_portion(source_store_->find(id), half); };
  ASSERT_TRUE(found()) << found().error().message();
  EXPECT_NE(found()->stored, nullptr);
  const auto stored = source_store_->find(id).front();
  const auto tensor = *stored->manifest.checkpoint->tensors.find(
      std::string(kFileTensorPrefix).append("config.json"));
  const LayoutEntry& entry = stored->manifest.layout.entries_of(tensor).front();
  std::fstream file(stored->segments[entry.segment]->path(),
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(entry.offset_bytes + 5));
  file.put('2');
  file.close();
  ASSERT_TRUE(found());
  EXPECT_EQ(found()->stored, nullptr) << "a pull finds the right one";
}

TEST_F(PortionTest, WhatWasFoundIsKnownForAsLongAsTheCopiesAreTheSame) {
  RecentPortions recent;
  EXPECT_EQ(recent.find(copies(), whole()).stored, nullptr);
  recent.add(copies(), whole(), *find_portion(copies(), whole()));
  const Found again = recent.find(copies(), whole());
  EXPECT_EQ(again.stored, copies().front());
  ASSERT_NE(again.portion, nullptr);
  EXPECT_EQ(again.portion->held.count(), again.portion->held.size());
  EXPECT_EQ(recent.find(copies(), strided()).stored, nullptr);
  EXPECT_EQ(recent.find({}, whole()).stored, nullptr);
  Copies more = copies();
  more.push_back(more.front());
  EXPECT_EQ(recent.find(more, whole()).stored, nullptr);
}

TEST_F(PortionTest, ACopyIsNotKeptFromGoing) {
  RecentPortions recent;
  recent.add(copies(), whole(), *find_portion(copies(), whole()));
  source_.reset();
  const std::weak_ptr<const store::StoredVersion> stored = copies().front();
  ASSERT_TRUE(source_store_->retire(id_));
  EXPECT_TRUE(stored.expired());
  EXPECT_EQ(recent.find(copies(), whole()).stored, nullptr);
}

TEST_F(PortionTest, TheOldestAreForgotten) {
  RecentPortions recent;
  const Found found = *find_portion(copies(), whole());
  Wanted wanted = whole();
  for (int i = 0; i < 33; ++i) {
    wanted.transport = std::to_string(i);
    recent.add(copies(), wanted, found);
  }
  EXPECT_EQ(recent.find(copies(), wanted).stored, found.stored);
  wanted.transport = "0";
  EXPECT_EQ(recent.find(copies(), wanted).stored, nullptr);
  wanted.transport = "1";
  EXPECT_EQ(recent.find(copies(), wanted).stored, found.stored);
}

}  // namespace
}  // namespace rekindle::worker
