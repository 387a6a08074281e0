// hostile_bench [--mib N] [--rounds N] [--connections N] [--only strangers|member]
//
// What hostile peers cost an honest pull: real daemons on loopback, a coordinator and one source,
// and `rekindle pull` of N MiB (512) over TCP. Each round pulls alone, under attack, and beside a
// process that takes as much CPU as the attackers did, and does nothing else. The medians of the
// rounds (5) and their ratios, beside the limit.
//
// The strangers do not have the secret of the fleet. They keep N (1000) connections to each of the
// three ports: a third says nothing, a third says half of a TLS hello, and a third connects again
// and again with a whole one. The member has a certificate of the fleet. It sends ANNOUNCEs that
// are too large, claims versions, takes sessions, and drips metadata as a source.
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <fmt/format.h>
#include <openssl/ssl.h>

#include "recovery/rpc/address.h"
#include "tests/recovery/rpc_certificates.h"
#include "tests/support/dripping_source.h"
#include "tests/support/fleet.h"
#include "tests/support/hostile_peer.h"
#include "tests/support/must.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::testing {
namespace {

namespace asio = boost::asio;
namespace fs = std::filesystem;
using asio::ip::tcp;
using rpc::testing::TestAuthority;
using rpc::testing::TestDirectory;
using Clock = std::chrono::steady_clock;

constexpr double kLimit = 1.2;
constexpr const char* kVersion = "m@1";
constexpr auto kAsTuple = asio::as_tuple(asio::use_awaitable);

double seconds_of(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// ---- The attackers: processes of their own, so that their CPU is counted apart.

// The first bytes of a client without the right secret.
std::string tls_hello() {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()),
                                                                  SSL_CTX_free);
  SSL* const ssl = SSL_new(context.get());
  BIO* const sent = BIO_new(BIO_s_mem());
  SSL_set_bio(ssl, BIO_new(BIO_s_mem()), sent);
  (void)SSL_connect(ssl);
  char* data = nullptr;
  const long size = BIO_get_mem_data(sent, &data);
  std::string hello(data, static_cast<std::size_t>(size));
  SSL_free(ssl);
  return hello;
}

// Keeps one connection to `target`: sends `words`, and waits until the server closes, or for
// `stay`. Then it begins again, at most once a second.
async::Task<void> stranger(tcp::endpoint target, asio::ip::address_v4 from, std::string words,
                           std::chrono::milliseconds stay, std::chrono::milliseconds first) {
  const auto executor = co_await asio::this_coro::executor;
  co_await async::sleep_for(first);
  for (;;) {
    const auto began = Clock::now();
    tcp::socket socket(executor, tcp::v4());
    boost::system::error_code ignored;
    socket.bind({from, 0}, ignored);
    asio::steady_timer watch(executor, stay);
    watch.async_wait([&socket](const boost::system::error_code& error) {
      if (!error) socket.close();
    });
    co_await socket.async_connect(target, kAsTuple);
    if (!words.empty()) co_await asio::async_write(socket, asio::buffer(words), kAsTuple);
    char answer[512];
    for (boost::system::error_code error; !error;) {
      error = std::get<0>(co_await socket.async_read_some(asio::buffer(answer), kAsTuple));
    }
    watch.cancel();
    socket.close(ignored);
    asio::steady_timer rest(executor, began + 1s);
    co_await rest.async_wait(kAsTuple);
  }
}

int attack_as_strangers(int connections, const std::vector<std::string>& targets) {
  rpc::testing::allow_many_descriptors();
  asio::io_context io(1);
  const std::string hello = tls_hello();
  int number = 0;
  for (const auto& text : targets) {
    const auto address = rpc::HostPort::parse(text).value();
    const tcp::endpoint target(asio::ip::make_address(address.host), address.port);
    for (int i = 0; i < connections; ++i, ++number) {
      const asio::ip::address_v4 from(0x7f000002u + static_cast<unsigned>(number % 8));
      const std::string words = i % 3 == 0 ? "" : i % 3 == 1 ? hello.substr(0, 100) : hello;
      const auto stay = i % 3 == 2 ? 1000ms : 60'000ms;
      // At a steady rate, not all in one moment.
      const std::chrono::milliseconds first(1000 * i / connections);
      asio::co_spawn(io, stranger(target, from, words, stay, first), asio::detached);
    }
  }
  fmt::print("ready\n");
  std::fflush(stdout);
  io.run();
  return 0;
}

struct MemberFleet {
  std::string coordinator;
  std::string source;
  rpc::Identity identity;
};

async::Task<std::shared_ptr<rpc::RpcClient>> connect_member(const MemberFleet& fleet,
                                                            const std::string& address) {
  for (;;) {
    auto client = co_await rpc::RpcClient::connect(address, fleet.identity, 10s);
    if (client) co_return *client;
    co_await async::sleep_for(200ms);
  }
}

// Bodies of 4 MiB that have nothing but empty parts, and one connection a second for a body of
// 16 MiB that ends with its first bytes.
async::Task<void> announce_too_much(const MemberFleet& fleet) {
  std::string parts;
  while (parts.size() < (4u << 20) - 2) parts += std::string_view("\x2a\0", 2);
  for (;;) {
    auto client = co_await connect_member(fleet, fleet.coordinator);
    while (client->connected()) {
      (void)co_await client->call_raw(proto::COORDINATOR_ANNOUNCE, parts, 10s);
      co_await async::sleep_for(200ms);
    }
  }
}

async::Task<void> claim_versions(const MemberFleet& fleet) {
  for (std::uint64_t version = 1;;) {
    auto client = co_await connect_member(fleet, fleet.coordinator);
    while (client->connected()) {
      proto::PublishRequest claim;
      claim.set_node_id(fleet.identity.node_id);
      claim.set_incarnation(fleet.identity.incarnation.to_bytes());
      *claim.mutable_id() = rpc::to_proto(ModelVersion{"squatted", ++version});
      *claim.mutable_root() = rpc::to_proto(test::numbered_digest(version, 1));
      *claim.mutable_tensor_set() = rpc::to_proto(test::numbered_digest(version, 2));
      claim.set_checkpoint_bytes(1);
      auto claiming = rpc::call<proto::COORDINATOR_PUBLISH>(client, std::move(claim), 10s);
      (void)co_await std::move(claiming);
      co_await async::sleep_for(10ms);
    }
  }
}

// Opens sessions and keeps them, as many as it gets.
async::Task<void> take_sessions(const MemberFleet& fleet) {
  for (;;) {
    auto client = co_await connect_member(fleet, fleet.source);
    while (client->connected()) {
      proto::OpenDirectRequest ask;
      ask.set_model("m");
      ask.set_version(1);
      ask.set_puller_incarnation(fleet.identity.incarnation.to_bytes());
      auto asking = rpc::call<proto::AGENT_OPEN_DIRECT>(client, std::move(ask), 10s);
      const auto found = co_await std::move(asking);
      if (found && found->sources_size() > 0) {
        const auto& source = found->sources(0);
        proto::OpenSessionRequest open;
        open.set_source_incarnation(source.node().incarnation());
        *open.mutable_id() = found->id();
        *open.mutable_root() = found->root();
        *open.mutable_layout() = source.layout();
        *open.mutable_grant() = source.grant();
        open.add_transports("tcp");
        auto opening = rpc::call<proto::AGENT_OPEN_SESSION>(client, std::move(open), 10s);
        (void)co_await std::move(opening);
      }
      co_await async::sleep_for(50ms);
    }
  }
}

int attack_as_member(const std::vector<std::string>& words) {
  if (words.size() != 5) throw std::runtime_error("COORDINATOR SOURCE CERT KEY CA");
  const auto credentials = rekindle::must(rpc::Credentials::open(
      {.certificate_file = words[2], .key_file = words[3], .authority_file = words[4]}));
  rpc::testing::DrippingSource::Options options;
  options.coordinator = words[0];
  options.version = {"m", 1};
  options.credentials = credentials;
  const rpc::testing::DrippingSource drip(std::move(options));
  const MemberFleet fleet{words[0], words[1],
                          rpc::make_identity(proto::ROLE_AGENT, "drip", credentials)};
  asio::io_context io(1);
  asio::co_spawn(io, announce_too_much(fleet), asio::detached);
  asio::co_spawn(io, claim_versions(fleet), asio::detached);
  asio::co_spawn(io, take_sessions(fleet), asio::detached);
  fmt::print("ready\n");
  std::fflush(stdout);
  io.run();
  return 0;
}

// Takes this part of the two cores, and touches nothing else.
int take_cpu(double cores) {
  fmt::print("ready\n");
  std::fflush(stdout);
  const auto spin = [](double share) {
    constexpr auto kPeriod = 5ms;
    for (auto next = Clock::now();; next += kPeriod) {
      const auto until = next + std::chrono::duration_cast<Clock::duration>(kPeriod * share);
      while (Clock::now() < until) {
      }
      std::this_thread::sleep_until(next + kPeriod);
    }
  };
  std::thread second(spin, std::clamp(cores - 1, 0.0, 1.0));
  spin(std::clamp(cores, 0.0, 1.0));
  return 0;
}

// ---- The measurement.

struct Options {
  int mib = 512;
  int rounds = 5;
  int connections = 1000;
  std::string only;
};

struct Pulled {
  double seconds = 0;
  // In cores, meanwhile.
  double attackers = 0;
  double coordinator = 0;
  double source = 0;
};

std::unique_ptr<Process> start_self(std::vector<std::string> words) {
  words.insert(words.begin(), fs::read_symlink("/proc/self/exe").string());
  auto process = std::make_unique<Process>(Spawn{.argv = std::move(words)});
  if (!process->wait_for_out("ready")) {
    throw std::runtime_error("the attackers did not start: " + process->err());
  }
  // Their connections stand.
  std::this_thread::sleep_for(2s);
  return process;
}

class Bench {
 public:
  // `words`: how a daemon of this role and a command prove who they are.
  using Words = std::function<std::vector<std::string>(const std::string& role)>;
  Bench(const Options& options, Words words) : words_(std::move(words)) {
    fleet_.start_coordinator("127.0.0.1", words_("coordinator"));
    fleet_.start_agent("a", words_("agent"));
    make_checkpoint(fleet_.dir("model"), options.mib / 8, 4096, 5);
    auto publish = with(words_("client"), {"publish", kVersion, fleet_.dir("model").string(),
                                           "--store", fleet_.agent("a").store.string()});
    if (const auto done = run(std::move(publish), 60s); done.exit.code != 0) {
      throw std::runtime_error("publish: " + done.err);
    }
    fs::remove_all(fleet_.dir("model"));
  }
  std::vector<std::string> ports() {
    const auto& agent = fleet_.agent("a");
    return {fleet_.coordinator_address(), agent.control, agent.data};
  }
  Pulled pull(Process* attackers) {
    const auto to = fleet_.dir("copy");
    const auto cpu = [&] {
      return std::array{attackers == nullptr ? 0 : testing::cpu_time(attackers->pid()).total_s(),
                        testing::cpu_time(fleet_.coordinator().pid()).total_s(),
                        testing::cpu_time(fleet_.agent("a").process->pid()).total_s()};
    };
    const auto before = cpu();
    const auto began = Clock::now();
    const auto done =
        run(with(words_("client"), {"pull", kVersion, "--to", to.string(), "--transport", "tcp"}),
            600s);
    const double took = seconds_of(Clock::now() - began);
    const auto after = cpu();
    if (done.exit.code != 0) throw std::runtime_error("the pull failed: " + done.err);
    fs::remove_all(to);
    return {took, (after[0] - before[0]) / took, (after[1] - before[1]) / took,
            (after[2] - before[2]) / took};
  }

 private:
  Spawn with(std::vector<std::string> credentials, std::vector<std::string> words) const {
    words.insert(words.end(), credentials.begin(), credentials.end());
    return fleet_.command(std::move(words));
  }

  const Words words_;
  Fleet fleet_;
};

Pulled median(std::vector<Pulled> pulls) {
  const auto middle = [&](auto member) {
    std::ranges::sort(pulls, {}, member);
    return pulls[pulls.size() / 2].*member;
  };
  return {middle(&Pulled::seconds), middle(&Pulled::attackers), middle(&Pulled::coordinator),
          middle(&Pulled::source)};
}

void report(const char* what, const Pulled& pulled) {
  fmt::print("  {:<34} {:6.2f} s   cores: attackers {:.2f}, coordinator {:.2f}, source {:.2f}\n",
             what, pulled.seconds, pulled.attackers, pulled.coordinator, pulled.source);
}

void measure(const char* name, Bench& bench, const Options& options,
             const std::vector<std::string>& attack) {
  std::vector<Pulled> alone;
  std::vector<Pulled> attacked;
  std::vector<Pulled> beside;
  bench.pull(nullptr);
  for (int round = 0; round < options.rounds; ++round) {
    alone.push_back(bench.pull(nullptr));
    auto attackers = start_self(attack);
    attacked.push_back(bench.pull(attackers.get()));
    attackers.reset();
    auto load = start_self({"--take-cpu", std::to_string(attacked.back().attackers)});
    beside.push_back(bench.pull(load.get()));
  }
  const Pulled a = median(alone);
  const Pulled b = median(attacked);
  const Pulled c = median(beside);
  fmt::print("{}\n", name);
  report("alone", a);
  report("under attack", b);
  report("beside a load of the same CPU", c);
  fmt::print("  ratio to the pull beside the load {:.2f}, to the pull alone {:.2f}; limit {}\n",
             b.seconds / c.seconds, b.seconds / a.seconds, kLimit);
  std::fflush(stdout);
}

void measure_strangers(const Options& options) {
  const TestDirectory files;
  const std::string secret = files.write("secret", "a secret of the benchmark");
  Bench bench(options, [&](const std::string&) {
    return std::vector<std::string>{"--secret-file", secret};
  });
  std::vector<std::string> attack{"--strangers", std::to_string(options.connections)};
  for (const auto& port : bench.ports()) attack.push_back(port);
  measure("strangers without the secret", bench, options, attack);
}

void measure_member(const Options& options) {
  const TestDirectory files;
  TestAuthority authority(files, "fleet");
  const auto issue = [&](const std::string& role, const std::string& name) {
    const auto made = authority.issue(
        name, {.names = fmt::format("URI:spiffe://example.org/rekindle/{}/{}", role, name)});
    return std::vector<std::string>{"--tls-cert", made.certificate_file, "--tls-key", made.key_file,
                                    "--tls-ca",   made.authority_file};
  };
  const std::map<std::string, std::vector<std::string>> words{
      {"coordinator", issue("coordinator", "c")},
      {"agent", issue("agent", "a")},
      {"client", issue("client", "ann")}};
  const auto drip = issue("agent", "drip");
  Bench bench(options, [&](const std::string& role) { return words.at(role); });
  const auto ports = bench.ports();
  measure("a member with a certificate", bench, options,
          {"--member", ports[0], ports[1], drip[1], drip[3], drip[5]});
}

int run_bench(const Options& options) {
  if (options.only != "member") measure_strangers(options);
  if (options.only != "strangers") measure_member(options);
  return 0;
}

int run_main(const std::vector<std::string>& words) {
  const std::string first = words.empty() ? "" : words[0];
  const auto rest = [&](std::size_t from) {
    return std::vector<std::string>(words.begin() + static_cast<std::ptrdiff_t>(from), words.end());
  };
  if (first == "--strangers") return attack_as_strangers(std::stoi(words.at(1)), rest(2));
  if (first == "--member") return attack_as_member(rest(1));
  if (first == "--take-cpu") return take_cpu(std::stod(words.at(1)));
  Options options;
  for (std::size_t i = 0; i + 1 < words.size(); i += 2) {
    if (words[i] == "--mib") {
      options.mib = std::stoi(words[i + 1]);
    } else if (words[i] == "--rounds") {
      options.rounds = std::stoi(words[i + 1]);
    } else if (words[i] == "--connections") {
      options.connections = std::stoi(words[i + 1]);
    } else if (words[i] == "--only") {
      options.only = words[i + 1];
    } else {
      throw std::runtime_error(
          "usage: hostile_bench [--mib N] [--rounds N] [--connections N] "
          "[--only strangers|member]");
    }
  }
  return run_bench(options);
}

}  // namespace
}  // namespace rekindle::testing

int main(int argc, char** argv) {
  try {
    return rekindle::testing::run_main({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "hostile_bench: {}\n", error.what());
    return 1;
  }
}
