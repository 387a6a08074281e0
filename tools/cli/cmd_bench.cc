#include <memory>
#include <string>

#include "recovery/device/process/host_devices.h"
#include "tools/bench/benchmarks.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"

#if REKINDLE_WITH_VERBS
#include "transport/verbs/device/fabric.h"
#endif

namespace rekindle::cli {
namespace {

struct BenchArgs {
  bench::TransferOptions options;
  std::string block = "64M";
  std::string total = "4G";
  std::string link = "0";
  std::string rows = "0";
};

Result<int> bench_transfer(const Settings& settings, BenchArgs args) {
  TRY(args.options.block_bytes, parse_size("--block", args.block));
  TRY(args.options.total_bytes, parse_size("--total", args.total));
  TRY(args.options.link_bytes_per_second, parse_size("--link", args.link));
  TRY(args.options.row_bytes, parse_size("--rows", args.rows));
  std::string source_hca = args.options.verbs.source.hca;
  args.options.verbs.source = args.options.verbs.puller;
  if (!source_hca.empty()) args.options.verbs.source.hca = std::move(source_hca);
  TRY(const bench::TransferReport report, bench::run_bench_transfer(args.options));
  print_result(settings.json, Json::parse(bench::to_json(report)), bench::to_text(report));
  return kExitOk;
}

struct RegisterArgs {
  transport::verbs::FabricOptions fabric;
  std::string bytes = "1G";
  bool huge = false;
  std::size_t rounds = 5;
  std::string gpu;
};

// A host without a device is not an error: the command reports it and succeeds.
int not_possible(const Settings& settings, const std::string& why) {
  print_result(settings.json, {{"bench", "register"}, {"possible", false}, {"why", why}},
               "bench register: not possible here: " + why + "\n");
  return kExitOk;
}

Result<int> bench_pin(const Settings& settings, const RegisterArgs& args) {
  bench::PinOptions options{.huge = args.huge, .rounds = args.rounds};
  TRY(options.bytes, parse_size("--bytes", args.bytes));
  TRY(const auto gpu, device::parse_gpu(args.gpu));
  auto devices = device::Devices::find(gpu.doubles);
  bucket::Device* const first = devices.open_first();
  if (first == nullptr) return not_possible(settings, devices.problem());
  TRY(const bench::PinReport report, bench::run_bench_pin(*first, options));
  print_result(settings.json, Json::parse(bench::to_json(report)), bench::to_text(report));
  return kExitOk;
}

#if REKINDLE_WITH_VERBS
Result<int> bench_register(const Settings& settings, const RegisterArgs& args) {
  bench::RegisterOptions options{.huge = args.huge, .rounds = args.rounds};
  TRY(options.bytes, parse_size("--bytes", args.bytes));
  const auto api = transport::verbs::make_system_api();
  TRY(const auto fabric, transport::verbs::Fabric::open(*api, args.fabric));
  if (fabric->devices().empty()) return not_possible(settings, fabric->why_empty());
  TRY(const bench::RegisterReport report, bench::run_bench_register(*fabric, options));
  print_result(settings.json, Json::parse(bench::to_json(report)), bench::to_text(report));
  return kExitOk;
}
#else
Result<int> bench_register(const Settings& settings, const RegisterArgs& args) {
  TRY([[maybe_unused]] const std::uint64_t bytes, parse_size("--bytes", args.bytes));
  return not_possible(settings, "this build has no RDMA backend");
}
#endif

void add_register(Command& bench, Session& session) {
  Command sub = bench.command(
      "register",
      "Memory registered with the RDMA devices, or pinned for GPUs, and next to it the limit of "
      "this\n"
      "host in the same run: as many fresh pages, touched or locked without a device.");
  auto args = std::make_shared<RegisterArgs>();
  sub.option("--bytes", args->bytes, "Bytes of each measurement [1G]").type_name("SIZE");
  sub.flag("--huge", args->huge, "Huge pages, which the host has set aside (hugetlbfs)");
  sub.option("--rounds", args->rounds, "Rounds; the figures are their medians [5]").type_name("N");
  sub.option("--gpu", args->gpu,
             "Pin it for the GPUs instead: auto, or double:1 (a GPU made of host memory)")
      .type_name("GPU");
  add_fabric_options(sub, args->fabric);
  sub.runs(session, "bench", [&session, args] {
    if (!args->gpu.empty()) return bench_pin(session.settings, *args);
    return bench_register(session.settings, *args);
  });
}

struct DigestArgs {
  bench::DigestOptions options;
  std::string bytes = "1G";
  std::string gpu_bytes = "4G";
};

Result<int> bench_digest(const Settings& settings, DigestArgs args) {
  TRY(args.options.bytes, parse_size("--bytes", args.bytes));
  TRY(args.options.gpu_bytes, parse_size("--gpu-bytes", args.gpu_bytes));
  TRY(const bench::DigestReport report, bench::run_bench_digest(args.options));
  print_result(settings.json, Json::parse(bench::to_json(report)), bench::to_text(report));
  return kExitOk;
}

void add_digest(Command& bench, Session& session) {
  Command sub = bench.command(
      "digest",
      "BLAKE3-256 of tiles on one core, on all cores and on the first GPU, and next to them their\n"
      "limits in the same run: memcpy, XXH3, and a copy inside the GPU's memory.");
  auto args = std::make_shared<DigestArgs>();
  sub.option("--bytes", args->bytes,
             "Host memory that each measurement reads; needs twice as much [1G]")
      .type_name("SIZE");
  sub.option("--gpu-bytes", args->gpu_bytes, "GPU memory; 0 leaves the GPU out [4G]")
      .type_name("SIZE");
  sub.option("--rounds", args->options.rounds, "Rounds; the figures are their medians [5]")
      .type_name("N");
  sub.runs(session, "bench", [&session, args] { return bench_digest(session.settings, *args); });
}

struct StoreArgs {
  std::string bytes = "2G";
  std::size_t rounds = 3;
};

Result<int> bench_store(const Settings& settings, const StoreArgs& args) {
  bench::StoreBenchOptions options{.store = settings.store, .bytes = 0, .rounds = args.rounds};
  TRY(options.bytes, parse_size("--bytes", args.bytes));
  TRY(const bench::StoreReport report, bench::run_bench_store(options));
  print_result(settings.json, Json::parse(bench::to_json(report)), bench::to_text(report));
  return kExitOk;
}

void add_store(Command& bench, Session& session) {
  Command sub = bench.command(
      "store",
      "Publishing files and allocating for pulls, next to parallel copies between warm memory.\n"
      "Fresh memory and the reserve apart. Works in a directory beside --store.");
  auto args = std::make_shared<StoreArgs>();
  sub.option("--bytes", args->bytes, "Size of the version; needs four times as much [2G]")
      .type_name("SIZE");
  sub.option("--rounds", args->rounds, "Rounds; the figures are their medians [3]").type_name("N");
  sub.runs(session, "bench", [&session, args] { return bench_store(session.settings, *args); });
}

}  // namespace

void add_bench(Command& app, Session& session) {
  Command sub = app.command("bench", "Measure this host, or the links of the fleet.");
  sub.require_command();
  Command transfer = sub.command(
      "transfer",
      "The transfer engine between real processes, and next to it the raw limit of this host in\n"
      "the same run: plain sockets with as many streams, a parallel memcpy, or plain RDMA reads.");
  auto args = std::make_shared<BenchArgs>();
  transfer.option("--transport", args->options.transport, "tcp, shm or verbs [tcp]")
      .one_of({"tcp", "shm", "verbs"})
      .type_name("NAME");
  transfer.option("--block", args->block, "Contiguous bytes of a request [64M]").type_name("SIZE");
  transfer.option("--total", args->total, "Bytes of each measurement [4G]").type_name("SIZE");
  transfer
      .option("--streams", args->options.streams, "Streams per source [chosen for the transport]")
      .type_name("N");
  add_fabric_options(transfer, args->options.verbs.puller);
  transfer
      .option("--source-hca", args->options.verbs.source.hca,
              "RDMA ports of the serving processes [as --hca]")
      .type_name("LIST")
      .group("RDMA");
  transfer.option("--sources", args->options.sources, "Processes that serve [1]").type_name("N");
  transfer.option("--rounds", args->options.rounds, "Rounds; the figures are their medians [5]")
      .type_name("N");
  transfer
      .option("--link", args->link,
              "Most bytes per second of each source, as on a slower link (tcp) [no limit]")
      .type_name("SIZE");
  transfer
      .option("--rows", args->rows,
              "Also read rows of this size, every second one, as column shards are read [none]")
      .type_name("SIZE");
  transfer
      .option("--tcp-congestion", args->options.tcp_congestion,
              "Congestion control of the sockets, such as cubic or bbr (tcp) [the host's]")
      .type_name("NAME");
  transfer
      .option("--file", args->options.file,
              "Move the bytes of this file; its size is --total, a multiple of --block [noise]")
      .type_name("FILE");
  transfer
      .option("--save", args->options.save,
              "Write the bytes that arrived last to this file, to compare them [none]")
      .type_name("FILE");
  transfer.flag("--cold", args->options.cold,
                "Free the destination's pages before each measurement (tcp, shm)");
  transfer.runs(session, "bench",
                [&session, args] { return bench_transfer(session.settings, *args); });
  add_store(sub, session);
  add_register(sub, session);
  add_digest(sub, session);
  add_bench_fleet(sub, session);
}

}  // namespace rekindle::cli
