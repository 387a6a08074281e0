#pragma once

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include "src/store/segment_store.h"
#include "src/tensor/held_tile.h"
#include "src/tensor/safetensors.h"
#include "tests/tensor/random_tensors.h"

namespace rekindle::store {

namespace fs = std::filesystem;

// A directory on tmpfs that goes with the test.
class TempDirectory {
 public:
  TempDirectory() {
    std::string name =
        (fs::exists("/dev/shm") ? "/dev/shm" : "/tmp") + std::string("/rekindle-test-XXXXXX");
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TempDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline std::string read_bytes(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << in.rdbuf();
  return std::move(bytes).str();
}
inline void write_bytes(const fs::path& path, std::string_view bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// A safetensors file with random data.
inline void write_safetensors(const fs::path& path, const std::vector<TensorInfo>& tensors,
                              std::uint64_t seed) {
  std::string bytes = *safetensors::make_header(tensors, {{"format", "pt"}}, 8);
  test::Rng rng(seed);
  for (const TensorInfo& tensor : tensors) {
    const auto data = test::random_bytes(rng, tensor.size_bytes());
    bytes.append(reinterpret_cast<const char*>(data.data()), data.size());
  }
  write_bytes(path, bytes);
}

// Shapes that make whole, cut, strided, empty and scalar tiles: about 5 MiB in two files.
inline std::vector<TensorInfo> first_file_tensors() {
  return {{"embed.weight", DType::kBF16, {1000, 512}},
          {"layers.0.down.weight", DType::kF32, {256, 2048}},
          {"layers.0.norm", DType::kF32, {512}},
          {"scalar", DType::kI64, {}}};
}
inline std::vector<TensorInfo> second_file_tensors() {
  return {{"empty", DType::kF16, {0, 4}}, {"lm_head.weight", DType::kU8, {3000, 700}}};
}

inline void write_checkpoint(const fs::path& directory, std::uint64_t seed) {
  write_safetensors(directory / "model-00001-of-00002.safetensors", first_file_tensors(), seed);
  write_safetensors(directory / "model-00002-of-00002.safetensors", second_file_tensors(),
                    seed + 1);
  write_bytes(directory / "config.json", R"({"model_type":"test"})");
  write_bytes(directory / "1_Pooling" / "config.json", "{}");
  write_bytes(directory / "vocab.txt", std::string(2'500'000, 'v'));  // three tiles
  write_bytes(directory / "README.md", "not part of the checkpoint");
}

inline std::unique_ptr<SegmentStore> open_store(const fs::path& directory,
                                                std::uint64_t budget_bytes = 1 << 30,
                                                std::optional<std::uint64_t> pool_bytes = 0) {
  auto store = SegmentStore::open({directory, budget_bytes, pool_bytes});
  EXPECT_TRUE(store) << store.error().message();
  return store ? std::move(*store) : nullptr;
}

inline Result<std::shared_ptr<const StoredVersion>> publish(SegmentStore& store,
                                                            const ModelVersion& id,
                                                            const fs::path& path) {
  const fs::path paths[] = {path};
  TRY(auto staged, store.stage(id, paths, nullptr));
  return store.commit_staged(std::move(staged));
}

inline std::vector<TensorBox> all_boxes(const Checkpoint& checkpoint) {
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < checkpoint.tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(checkpoint.tensors[i].shape)});
  }
  return boxes;
}

// Boxes whose borders cut through tiles in both dimensions; one tensor in two boxes that share one.
// Of the parts of embed.weight a copy keeps proofs.
inline std::vector<TensorBox> shard_boxes(const Checkpoint& checkpoint) {
  const auto index = [&](std::string_view name) { return *checkpoint.tensors.find(name); };
  return {{index("embed.weight"), {{96, 0}, {304, 512}}},
          {index("layers.0.down.weight"), {{0, 200}, {256, 1000}}},
          {index("layers.0.norm"), {{1}, {100}}},
          {index("scalar"), {}},
          {index("empty"), Box::whole({0, 4})},
          {index("lm_head.weight"), {{0, 0}, {777, 700}}},
          {index("lm_head.weight"), {{777, 0}, {1000, 350}}}};
}

// What a source that holds all of the tile says of a part of it.
inline std::string proof_of(const StoredVersion& from, TileIndex tile, const Box& part) {
  const Checkpoint& checkpoint = *from.manifest.checkpoint;
  const TensorIndex tensor = checkpoint.tiles.tensor_of(tile);
  const std::uint64_t element_bytes = dtype_size_bytes(checkpoint.tensors[tensor].dtype);
  const Box whole = checkpoint.tiles.tile_box(tile);
  std::vector<std::byte> bytes(whole.elements() * element_bytes);
  EXPECT_TRUE(read_tile(
      checkpoint, from.manifest.layout, tile,
      [&](const LayoutEntry& entry) { return from.array(entry); }, bytes));
  return prove_range(bytes, range_in_tile(part, whole, element_bytes));
}

// Copies what `pending` wants of these tiles from a full copy, keeps their proofs and marks them.
inline void fill_tiles(PendingVersion& pending, const StoredVersion& from, TileIndex begin,
                       TileIndex end) {
  const Checkpoint& checkpoint = *pending.manifest().checkpoint;
  const Layout& layout = pending.manifest().layout;
  for (TileIndex tile = begin; tile < end; ++tile) {
    const TensorIndex tensor = checkpoint.tiles.tensor_of(tile);
    const std::uint64_t element_bytes = dtype_size_bytes(checkpoint.tensors[tensor].dtype);
    const LayoutEntry& source = from.manifest.layout.entries_of(tensor)[0];
    for (const LayoutEntry& entry : layout.entries_of(tensor)) {
      const auto part = intersect(entry.box, checkpoint.tiles.tile_box(tile));
      if (!part) continue;
      std::vector<StridedCopy> copies;
      strided_copies(*part, source.box, entry.box, element_bytes, copies);
      const auto to = pending.segment(entry.segment).subspan(entry.offset_bytes);
      for (const StridedCopy& copy : copies) {
        for (std::uint64_t i = 0; i < copy.count; ++i) {
          std::memcpy(to.data() + copy.dst_offset + i * copy.dst_stride,
                      from.array(source).data() + copy.src_offset + i * copy.src_stride,
                      copy.run_bytes);
        }
      }
    }
    for (const KeptProof& kept : kept_proofs(checkpoint, layout, tile)) {
      pending.keep_proof(tile, kept.part, proof_of(from, tile, kept.part));
    }
    pending.mark_verified(tile);
  }
}
inline void fill_all(PendingVersion& pending, const StoredVersion& from) {
  fill_tiles(pending, from, 0, pending.manifest().checkpoint->tiles.tile_count());
}

inline PackedLayout pack(const Checkpoint& checkpoint, const std::vector<TensorBox>& boxes) {
  auto packed = pack_layout(checkpoint.tensors, boxes, 1 << 20);
  EXPECT_TRUE(packed) << packed.error().message();
  return std::move(*packed);
}

// A store with org/model@1 published, and a second, empty one to pull into.
class StoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    write_checkpoint(source_path(), 1);
    source_store_ = open_store(temp_.path() / "a");
    auto published = publish(*source_store_, id_, source_path());
    ASSERT_TRUE(published) << published.error().message();
    source_ = *published;
    store_ = open_store(store_path());
  }
  fs::path source_path() const { return temp_.path() / "source"; }
  fs::path store_path() const { return temp_.path() / "b"; }
  const std::shared_ptr<const Checkpoint>& checkpoint() const {
    return source_->manifest.checkpoint;
  }
  // What the store deletes later has gone, and nothing is pooled.
  void wait_until_deleted() const {
    while (!fs::is_empty(store_path() / "pool")) std::this_thread::yield();
  }
  void reopen() {
    store_.reset();
    store_ = open_store(store_path());
  }
  std::unique_ptr<PendingVersion> begin(const std::vector<TensorBox>& boxes) {
    auto pending = store_->begin(checkpoint(), pack(*checkpoint(), boxes));
    EXPECT_TRUE(pending) << pending.error().message();
    return pending ? std::move(*pending) : nullptr;
  }
  std::shared_ptr<const StoredVersion> pull(const std::vector<TensorBox>& boxes) {
    auto pending = begin(boxes);
    fill_all(*pending, *source_);
    auto version = store_->commit(std::move(pending));
    EXPECT_TRUE(version) << version.error().message();
    return version ? *version : nullptr;
  }

  const ModelVersion id_{"org/model", 1};
  TempDirectory temp_;
  std::unique_ptr<SegmentStore> source_store_;
  std::shared_ptr<const StoredVersion> source_;
  std::unique_ptr<SegmentStore> store_;
};

}  // namespace rekindle::store
