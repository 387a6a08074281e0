#include "tools/cli/trace_query.h"

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/trace.pb.h"
#include "recovery/rpc/methods.h"
#include "recovery/trace/trace_wire.h"
#include "tests/support/process.h"

// What `rekindle trace` does with processes that answer slowly.
namespace rekindle::cli {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr std::chrono::milliseconds kPatience{50};

// A coordinator in a thread. It answers the question for a whole trace when `kPatience` is over,
// and names two agents, of which nobody knows anything.
class SlowCoordinator {
 public:
  SlowCoordinator() {
    span_.context = {trace::TraceId::random(), trace::SpanId::random()};
    span_.name = "update";
    span_.attributes = {{std::string(trace::kOperation), std::string("update")},
                        {std::string(trace::kSubject), std::string("m@1")}};
    const rpc::Identity identity = rpc::make_identity(proto::ROLE_COORDINATOR, "coordinator");
    server_ = rpc::RpcServer::create(io_.get_executor(), identity);
    rpc::handle<proto::FIND_TRACE>(
        *server_, [this](const rpc::Peer&, const proto::TraceRequest& request, const rpc::Events&) {
          return at_once(answer(request));
        });
    const auto address = server_->listen("127.0.0.1:0");
    EXPECT_TRUE(address);
    address_ = *address;
    thread_ = std::thread([this] { io_.run(); });
  }
  ~SlowCoordinator() {
    boost::asio::co_spawn(io_, server_->close(5s),
                          [this](const std::exception_ptr&) { io_.stop(); });
    thread_.join();
  }
  const std::string& address() const { return address_; }

 private:
  static async::Task<Result<proto::TraceResponse>> at_once(proto::TraceResponse response) {
    co_return response;
  }
  proto::TraceResponse answer(const proto::TraceRequest& request) const {
    proto::TraceResponse response;
    *response.add_spans() = trace::to_proto(span_);
    if (request.trace_id().empty()) return response;
    std::this_thread::sleep_for(2 * kPatience);
    for (const char* name : {"a", "b"}) {
      auto& node = *response.add_nodes();
      node.set_node_id(name);
      node.set_control_endpoint("127.0.0.1:1");
    }
    return response;
  }

  trace::Span span_;
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{
      io_.get_executor()};
  std::unique_ptr<rpc::RpcServer> server_;
  std::string address_;
  std::thread thread_;
};

TEST(CollectTrace, AsksNoFurtherAgentsOnceItsPatienceIsOver) {
  SlowCoordinator coordinator;
  const rekindle::testing::TempDir store;
  Settings settings;
  settings.store = store.path();
  settings.coordinator = coordinator.address();
  const TraceWanted wanted{.operation = "update", .subject = "m@1", .agent = ""};
  const auto collected = collect_trace(settings, wanted, kPatience);
  ASSERT_TRUE(collected) << collected.error().message();
  EXPECT_EQ(collected->spans.size(), 1u) << "what was there is kept";
  ASSERT_EQ(collected->silent.size(), 2u);
  for (const std::string& silent : collected->silent) EXPECT_THAT(silent, HasSubstr("not asked"));
  const auto patient = collect_trace(settings, wanted);
  ASSERT_TRUE(patient) << patient.error().message();
  ASSERT_EQ(patient->silent.size(), 2u);
  for (const std::string& silent : patient->silent) {
    EXPECT_THAT(silent, ::testing::Not(HasSubstr("not asked")));
  }
}

}  // namespace
}  // namespace rekindle::cli
