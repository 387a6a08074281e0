// A broadcast round over the GPUs of this host: each owns an even part of the weights in pinned
// host memory, all get everything, consumers copy every bucket out. Three ways in turn, in one run:
//   limit      plain uploads of its own part by every GPU, all at once, and nothing else
//   round      the pipeline of src/bucket with NCCL's all-gather, as in docs/internals/rounds.md
//   schedule   as checkpoint-engine's ParameterServer goes about it: a communicator per update;
//   upload
//              into a buffer, copy on the device, broadcast, and the host waits before and after
//              the consumer's copy of each bucket
//
//   broadcast_bench [--gib N] [--tensors N] [--gpus N] [--runs N] [--bucket MIB]
//
// Prints medians, limit / round and schedule / round, and whether every byte is right.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>

#include "src/base/clock.h"
#include "src/base/units.h"
#include "src/bucket/round_stages.h"
#include "src/cuda/device.h"
#include "src/cuda/nccl.h"
#include "tests/support/must.h"

namespace {

using namespace rekindle;          // NOLINT(google-build-using-namespace)
using namespace rekindle::bucket;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;

TimePoint soon() { return steady_now() + 120s; }

struct Options {
  double gib = 64;
  std::uint64_t tensors = 1024;
  std::uint32_t gpus = 0;
  std::size_t runs = 5;
  std::uint64_t bucket_mib = 256;
};

// The weights in host memory; 8-byte word j of tensor i is i << 40 | j.
struct Model {
  TensorSet tensors;
  Layout layout;
  std::vector<std::uint64_t> segment_bytes;
  std::vector<UniqueFd> files;

  Contents contents() const {
    return must(Contents::create(tensors.serialize(), layout.serialize(), {}, segment_bytes));
  }
};

void fill(const Model& model, unsigned thread, unsigned threads) {
  for (std::size_t i = thread; i < model.layout.entries().size(); i += threads) {
    const LayoutEntry& entry = model.layout.entries()[i];
    const std::uint64_t bytes = model.tensors[entry.tensor].size_bytes();
    std::vector<std::uint64_t> words(bytes / 8);
    for (std::uint64_t j = 0; j < words.size(); ++j)
      words[j] = std::uint64_t{entry.tensor} << 40 | j;
    const auto* at = reinterpret_cast<const char*>(words.data());
    for (std::uint64_t done = 0; done < bytes;) {
      const ssize_t put = ::pwrite(model.files[entry.segment].get(), at + done, bytes - done,
                                   static_cast<off_t>(entry.offset_bytes + done));
      if (put <= 0) std::exit(3);
      done += static_cast<std::uint64_t>(put);
    }
  }
}

Model make_model(const Options& options) {
  const auto bytes = static_cast<std::uint64_t>(options.gib * (1ull << 30));
  std::vector<TensorInfo> infos;
  const std::uint64_t rows = bytes / options.tensors / 8192;
  for (std::uint64_t i = 0; i < options.tensors; ++i) {
    infos.push_back({fmt::format("layer.{:06}", i), DType::kBF16, {rows, 4096}});
  }
  auto tensors = must(TensorSet::create(std::move(infos)));
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < tensors.size(); ++i)
    boxes.push_back({i, Box::whole(tensors[i].shape)});
  auto layout = must(pack_layout(tensors, boxes, 4ull << 30)).layout;
  Model model{std::move(tensors), std::move(layout), {}, {}};
  for (const SegmentSpec& segment : model.layout.segments()) {
    model.segment_bytes.push_back(segment.size_bytes);
    UniqueFd fd(::memfd_create("weights", MFD_CLOEXEC));
    if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(segment.size_bytes)) != 0) std::exit(3);
    model.files.push_back(std::move(fd));
  }
  std::vector<std::thread> threads;
  const unsigned count = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned i = 0; i < count; ++i) threads.emplace_back(fill, std::cref(model), i, count);
  for (std::thread& thread : threads) thread.join();
  return model;
}

// What the ranks, a thread each, have in common.
struct Shared {
  const Options& options;
  const Model& model;
  const RoundPlan& plan;
  const Pinner& pinner;
  const SegmentFetch::Segments& segments;
  std::shared_ptr<const cuda::Driver> driver;
  std::shared_ptr<const cuda::Nccl> nccl;
  Collectives& collectives;
  std::barrier<>& barrier;
  std::string id;  // of the round's collective, made once
  cuda::Nccl::UniqueId schedule_id;
};

// A worker in the same process: copies each bucket's parts to where its parameters are.
class Consumer final : public Deliver {
 public:
  Consumer(const Shared& shared, Device& device, Slots& slots, const Contents& contents)
      : shared_(shared), device_(device), slots_(slots), stream_(must(device.make_stream())) {
    std::uint64_t total = 0;
    for (const Piece& piece : contents.pieces()) {
      at_.push_back(total);
      total += round_up(piece.bytes, kPartAlignment);
    }
    memory_ = must(device.allocate(total));
    for (std::uint32_t i = 0; i < slots.count(); ++i) read_.push_back(must(device.make_event()));
  }
  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override {
    TRY_VOID(stream_->wait(*slots_.filled[slot]));
    TRY_VOID(copy_out(shared_.plan.parts(bucket), slots_.at(slot)));
    return stream_->record(*read_[slot]);
  }
  Result<bool> released(std::uint32_t slot) override { return device_.is_done(*read_[slot]); }
  Result<void> copy_out(const std::vector<Part>& parts, DeviceAddress from) {
    moves_.clear();
    for (const Part& part : parts) {
      moves_.push_back({from + part.at, target(part.piece) + part.offset_bytes, part.bytes});
    }
    return stream_->move(moves_);
  }
  DeviceAddress target(std::uint32_t piece) const { return memory_->address() + at_[piece]; }
  Stream& stream() { return *stream_; }

 private:
  const Shared& shared_;
  Device& device_;
  Slots& slots_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Memory> memory_;
  std::vector<std::uint64_t> at_;
  std::vector<std::unique_ptr<Event>> read_;
  std::vector<Move> moves_;
};

// Waits until all ranks have met, or a call has reached the GPU.
template <typename Communicator>
void settle(Communicator& communicator) {
  const TimePoint deadline = soon();
  while (!must(communicator.settled())) {
    if (steady_now() >= deadline) must(Result<void>(fail(ErrorCode::kTimeout, "nobody came")));
    std::this_thread::sleep_for(50us);
  }
}

class RankRun {
 public:
  RankRun(const Shared& shared, std::uint32_t rank)
      : shared_(shared),
        rank_(rank),
        device_(must(cuda::open_device(shared.driver, static_cast<int>(rank)))),
        contents_(shared.model.contents()),
        slots_(must(allocate_slots(*device_,
                                   {.bucket_bytes = shared.plan.bucket_bytes(),
                                    .slots = 3,
                                    .free_fraction = 1.0,
                                    .cap_bytes = 4ull << 30},
                                   contents_.total_bytes()))),
        consumer_(shared, *device_, slots_, contents_),
        stream_(must(device_->make_stream())),
        collective_(
            must(shared.collectives.meet(*device_, rank, shared.plan.shares(), shared.id))) {
    settle(*collective_);
  }

  void limit() {
    SegmentFetch own = fetch();
    for (std::size_t k = 0; k < plan().size(); ++k) {
      for (const SegmentCopy& copy : plan().copies(k)) {
        const Upload upload{shared_.segments[copy.segment]->data() + copy.from,
                            slots_.at(static_cast<std::uint32_t>(k % slots_.count())) + copy.at,
                            copy.run_bytes};
        must(stream_->upload({&upload, 1}));
      }
    }
    must(stream_->finish(soon()));
  }

  void round() {
    SegmentFetch own = fetch();
    RoundFetch fetch(shared_.plan, RoundFetch::Own{rank_, own});
    std::vector<std::uint32_t> owners(shared_.plan.shares());
    std::iota(owners.begin(), owners.end(), 0u);
    RoundSpread spread(*collective_, shared_.plan.share_bytes(), std::move(owners), {});
    Pipeline pipeline(*device_, shared_.plan.size(), slots_, fetch, &spread, consumer_);
    must(pipeline.start());
    while (must(pipeline.step(steady_now())) != Pipeline::State::kDone) {
    }
  }

  void schedule() {
    const auto communicator = must(cuda::Communicator::start(
        shared_.nccl, *device_, {static_cast<int>(rank_), static_cast<int>(shared_.plan.shares())},
        shared_.schedule_id));
    settle(*communicator);
    const std::uint64_t share = shared_.plan.share_bytes();
    const DeviceAddress staging = slots_.at(0);
    SegmentFetch own = fetch();
    std::uint64_t turn = 0;
    for (std::size_t k = 0; k < shared_.plan.size(); ++k) {
      if (k < plan().size()) must(own.enqueue(k, staging, *stream_));
      for (std::uint32_t owner = 0; owner < shared_.plan.shares(); ++owner, ++turn) {
        if (k >= shared_.plan.plan_of(owner).size()) continue;
        const DeviceAddress buffer = slots_.at(1) + turn % 2 * share;
        if (owner == rank_) {
          const Move move{staging, buffer, share};
          must(stream_->move({&move, 1}));
        }
        must(communicator->broadcast(buffer, buffer, share, static_cast<int>(owner), *stream_));
        settle(*communicator);
        must(stream_->finish(soon()));
        const auto parts = shared_.plan.plan_of(owner).parts(k);
        must(consumer_.copy_out({parts.begin(), parts.end()}, buffer));
        must(consumer_.stream().finish(soon()));
      }
    }
    // No rank's communicator ends while another rank still uses it.
    shared_.barrier.arrive_and_wait();
  }

  std::uint64_t wrong_words() {
    std::uint64_t wrong = 0;
    for (std::uint32_t i = 0; i < contents_.pieces().size(); ++i) {
      const Piece& piece = contents_.pieces()[i];
      std::vector<std::uint64_t> words(piece.bytes / 8);
      const Download copy{consumer_.target(i), reinterpret_cast<std::byte*>(words.data()),
                          piece.bytes};
      must(stream_->download({&copy, 1}));
      must(stream_->finish(soon()));
      for (std::uint64_t j = 0; j < words.size(); ++j) {
        wrong += words[j] != (std::uint64_t{piece.tensor} << 40 | j);
      }
    }
    return wrong;
  }

 private:
  const Plan& plan() const { return shared_.plan.plan_of(rank_); }
  SegmentFetch fetch() const {
    SegmentFetch own(plan(), shared_.pinner, shared_.segments, contents_.tiles().tile_count());
    own.mark_all_ready();
    return own;
  }

  const Shared& shared_;
  const std::uint32_t rank_;
  const std::unique_ptr<Device> device_;
  const Contents contents_;
  Slots slots_;
  Consumer consumer_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<Collective> collective_;
};

struct Times {
  std::vector<double> limit, round, schedule;
};

double timed(Shared& shared, const std::function<void()>& work) {
  shared.barrier.arrive_and_wait();
  const TimePoint begin = steady_now();
  work();
  shared.barrier.arrive_and_wait();  // the slowest counts
  return seconds(steady_now() - begin);
}

void run_rank(Shared& shared, std::uint32_t rank, Times& times, std::uint64_t& wrong) {
  RankRun run(shared, rank);
  timed(shared, [&] { run.round(); });  // warm
  for (std::size_t i = 0; i < shared.options.runs; ++i) {
    times.limit.push_back(timed(shared, [&] { run.limit(); }));
    times.round.push_back(timed(shared, [&] { run.round(); }));
    if (rank == 0) shared.schedule_id = must(shared.nccl->make_id());
    shared.barrier.arrive_and_wait();
    times.schedule.push_back(timed(shared, [&] { run.schedule(); }));
  }
  timed(shared, [&] { run.round(); });
  wrong = run.wrong_words();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--gib") options.gib = std::atof(argv[i + 1]);
    if (name == "--tensors") options.tensors = static_cast<std::uint64_t>(std::atoll(argv[i + 1]));
    if (name == "--gpus") options.gpus = static_cast<std::uint32_t>(std::atoi(argv[i + 1]));
    if (name == "--runs") options.runs = static_cast<std::size_t>(std::atoi(argv[i + 1]));
    if (name == "--bucket") options.bucket_mib = static_cast<std::uint64_t>(std::atoi(argv[i + 1]));
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);  // no NVLink multicast
  Options options = options_of(argc, argv);
  const auto driver = must(cuda::Driver::load());
  const auto found = must(cuda::list_devices(*driver));
  if (options.gpus == 0) options.gpus = static_cast<std::uint32_t>(found.size());
  const Model model = make_model(options);
  const Contents contents = model.contents();
  const auto owner = share_out(contents.pieces(), options.gpus);
  const auto plan =
      must(RoundPlan::create(contents, owner, options.gpus, options.bucket_mib << 20));
  const auto first = must(cuda::open_device(driver, 0));
  Pinner pinner(*first, Pinner::kThreads);
  SegmentFetch::Segments segments;
  for (std::size_t i = 0; i < model.files.size(); ++i) {
    segments.push_back(must(pinner.add(model.files[i].get(), model.segment_bytes[i])));
  }
  for (const auto& segment : segments) {
    pinner.wait(*segment, soon());
    if (const auto failure = pinner.failure(*segment)) must(Result<void>(fail(*failure)));
  }
  const auto nccl = must(cuda::Nccl::load());
  const auto collectives = must(cuda::make_nccl_collectives());
  std::barrier<> barrier(static_cast<std::ptrdiff_t>(options.gpus));
  Shared shared{options, model, plan,         pinner,  segments,
                driver,  nccl,  *collectives, barrier, must(collectives->make_id()),
                {}};
  std::vector<Times> times(options.gpus);
  std::vector<std::uint64_t> wrong(options.gpus);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < options.gpus; ++rank) {
    threads.emplace_back([&, rank] { run_rank(shared, rank, times[rank], wrong[rank]); });
  }
  for (std::thread& thread : threads) thread.join();

  const double limit = median(times[0].limit);
  const double round = median(times[0].round);
  const double schedule = median(times[0].schedule);
  std::uint64_t all_wrong = 0;
  for (const std::uint64_t words : wrong) all_wrong += words;
  fmt::print("{:.1f} GiB in {} tensors over {} GPUs ({}), buckets of {} MiB, {} runs, NCCL {}\n",
             options.gib, options.tensors, options.gpus, found.front().name, options.bucket_mib,
             options.runs, nccl->version());
  const double bytes = static_cast<double>(contents.total_bytes());
  fmt::print("  plain uploads of each part     {:.3f} s  {:.0f} GB/s together\n", limit,
             bytes / limit / 1e9);
  fmt::print("  round                          {:.3f} s\n", round);
  fmt::print("  checkpoint-engine's schedule   {:.3f} s\n", schedule);
  fmt::print("  round / uploads {:.3f}   schedule / round {:.2f}   wrong words: {}\n",
             round / limit, schedule / round, all_wrong);
  return all_wrong == 0 ? 0 : 1;
}
