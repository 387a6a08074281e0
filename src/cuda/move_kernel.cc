#include "src/cuda/move_kernel.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace rekindle::cuda {

namespace {

constexpr unsigned kMoveThreads = 256;
// Of a move: 64 KiB at a time.
constexpr unsigned kBlocks = 16;
constexpr const char* kMoveName = "rekindle_move";

// Block (x, y) is block y of move x. If both ends are 16-byte aligned, a thread copies 16 bytes at
// once; if both are even, 2 bytes. Remainders, and moves at odd addresses, are copied byte by byte.
constexpr const char* kMoveCode = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry rekindle_move(.param .align 8 .b8 moves[3840]) {
  .reg .pred %p;
  .reg .b16 %h;
  .reg .b32 %a, %b, %c, %d;
  .reg .b64 %move, %from, %to, %bytes, %lane, %lanes, %both, %at, %end, %step, %f, %t;

  mov.b64 %move, moves;
  mov.u32 %a, %ctaid.x;
  mul.wide.u32 %at, %a, 24;
  add.u64 %move, %move, %at;
  ld.param.u64 %from, [%move];
  ld.param.u64 %to, [%move+8];
  ld.param.u64 %bytes, [%move+16];
  cvta.to.global.u64 %from, %from;
  cvta.to.global.u64 %to, %to;

  mov.u32 %a, %ntid.x;
  mov.u32 %b, %ctaid.y;
  mov.u32 %c, %tid.x;
  mad.lo.u32 %d, %b, %a, %c;
  cvt.u64.u32 %lane, %d;
  mov.u32 %b, %nctaid.y;
  mul.wide.u32 %lanes, %a, %b;

  or.b64 %both, %from, %to;
  and.b64 %at, %both, 15;
  setp.ne.u64 %p, %at, 0;
  @%p bra PAIRS;
  and.b64 %end, %bytes, -16;
  shl.b64 %at, %lane, 4;
  shl.b64 %step, %lanes, 4;
WIDE:
  setp.ge.u64 %p, %at, %end;
  @%p bra REST;
  add.u64 %f, %from, %at;
  add.u64 %t, %to, %at;
  ld.global.v4.u32 {%a, %b, %c, %d}, [%f];
  st.global.v4.u32 [%t], {%a, %b, %c, %d};
  add.u64 %at, %at, %step;
  bra WIDE;

PAIRS:
  mov.u64 %end, 0;
  and.b64 %at, %both, 1;
  setp.ne.u64 %p, %at, 0;
  @%p bra REST;
  and.b64 %end, %bytes, -2;
  shl.b64 %at, %lane, 1;
  shl.b64 %step, %lanes, 1;
PAIR:
  setp.ge.u64 %p, %at, %end;
  @%p bra REST;
  add.u64 %f, %from, %at;
  add.u64 %t, %to, %at;
  ld.global.u16 %h, [%f];
  st.global.u16 [%t], %h;
  add.u64 %at, %at, %step;
  bra PAIR;

REST:
  add.u64 %at, %end, %lane;
BYTE:
  setp.ge.u64 %p, %at, %bytes;
  @%p bra DONE;
  add.u64 %f, %from, %at;
  add.u64 %t, %to, %at;
  ld.global.u8 %h, [%f];
  st.global.u8 [%t], %h;
  add.u64 %at, %at, %lanes;
  bra BYTE;
DONE:
  ret;
}
)";

using Parameter = std::array<bucket::Move, MoveKernel::kMost>;
static_assert(sizeof(Parameter) == 3840 && offsetof(bucket::Move, to) == 8 &&
              offsetof(bucket::Move, bytes) == 16);

}  // namespace

std::unique_ptr<MoveKernel> MoveKernel::load(std::shared_ptr<const Context> context) {
  const Api& api = context->api();
  CUmodule module = nullptr;
  if (api.module_load(&module, kMoveCode) != CUDA_SUCCESS) return nullptr;
  CUfunction function = nullptr;
  if (api.module_function(&function, module, kMoveName) != CUDA_SUCCESS) {
    api.module_unload(module);
    return nullptr;
  }
  return std::unique_ptr<MoveKernel>(new MoveKernel(std::move(context), module, function));
}

CUresult MoveKernel::launch(std::span<const bucket::Move> moves, CUstream stream) const {
  const Api& api = module_.context().api();
  Parameter parameter{};
  void* parameters[] = {parameter.data()};
  while (!moves.empty()) {
    const auto some = moves.first(std::min(moves.size(), kMost));
    std::copy(some.begin(), some.end(), parameter.begin());
    const CUresult result = api.launch(function_, static_cast<unsigned>(some.size()), kBlocks, 1,
                                       kMoveThreads, 1, 1, 0, stream, parameters, nullptr);
    if (result != CUDA_SUCCESS) return result;
    moves = moves.subspan(some.size());
  }
  return CUDA_SUCCESS;
}

}  // namespace rekindle::cuda
