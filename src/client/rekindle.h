/* librekindle: a worker process gets model weights from the Rekindle agent of its host, and a
 * trainer publishes them. A stable C ABI; link with -lrekindle.
 *
 *   rk_error error;
 *   rk_agent* agent;      rk_connect(NULL, &agent, &error);
 *   rk_session* session;  rk_attach(agent, &(rk_attach_options){.size = sizeof(rk_attach_options),
 *                             .model = "qwen3", .shard = "tp=3/8"}, &session, &error);
 *   const rk_tensor* tensors; size_t count;
 *   while (rk_next(session, 10000, &tensors, &count, &error) == RK_OK && count > 0) { copy them }
 *   rk_loaded(session, &error);              // this rank has everything
 *   rk_wait_commit(session, 60000, &error);  // every rank of the instance has everything: serve
 *
 * Functions return RK_OK or an error code. `error` then has the same code and a message of one
 * line; it may be NULL. All functions are thread-safe. A session may be detached while calls of
 * other threads on it still run; they return RK_STALE. There is no global state. Structures begin
 * with their size, so that later versions can extend them. Times are milliseconds. A call with a
 * timeout of 0 does not wait. No call waits for ever, except rk_connect() in a standby.
 *
 * After fork() only the parent may use its handles. When the agent dies, calls return RK_PEER_LOST
 * and mapped tensors stay readable. A new connection then reaches the restarted agent, and
 * rk_attach finds the bytes that were verified before.
 */
#ifndef REKINDLE_H
#define REKINDLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define RK_API __attribute__((visibility("default")))
#else
#define RK_API
#endif

#define RK_API_VERSION 1

typedef enum rk_code {
  RK_OK = 0,
  /* The input is wrong: fix it, do not retry. */
  RK_INVALID = 1,
  /* There is no such model or version, or no host holds it. The message names it. */
  RK_NOT_FOUND = 2,
  /* The deadline has passed. The session goes on: call again. */
  RK_TIMEOUT = 3,
  /* The agent is gone: connect and attach again. */
  RK_PEER_LOST = 4,
  /* The session has ended: its version was retired, or its instance moved on. */
  RK_STALE = 5,
  /* Bytes do not match their digest, and no host has better ones. */
  RK_CORRUPT = 6,
  /* Out of memory, space or descriptors. */
  RK_EXHAUSTED = 7,
  /* This user may not do it, or the version exists with other bytes. */
  RK_DENIED = 8,
  /* Not possible now: try again with back-off. */
  RK_UNAVAILABLE = 9,
  /* A bug, or a file or device of this host that fails. */
  RK_INTERNAL = 10
} rk_code;

typedef struct rk_error {
  int32_t code;
  /* One line of UTF-8, terminated by 0. */
  char message[1020];
} rk_error;

typedef struct rk_agent rk_agent;
typedef struct rk_session rk_session;
typedef struct rk_publication rk_publication;

/* RK_API_VERSION of the library. */
RK_API uint32_t rk_api_version(void);
/* "0.1.0" */
RK_API const char* rk_library_version(void);
RK_API const char* rk_code_name(int32_t code);

/* --- the agent of this host */

typedef struct rk_connect_options {
  uint32_t size;
  /* The agent's store. NULL: /dev/shm/rekindle. */
  const char* store;
  /* 0: 5000. */
  int64_t timeout_ms;
} rk_connect_options;

/* Waits until this process takes over, if it is a standby of `rekindle run --standby`, which
 * $REKINDLE_STANDBY tells. Returns RK_OK at once in every other process. `failures`: how many times
 * in a row the worker has failed; it may be null. RK_TIMEOUT: not yet, call again. RK_UNAVAILABLE:
 * `rekindle run` has ended. */
RK_API int32_t rk_wait_standby(int64_t timeout_ms, uint32_t* failures, rk_error* error);

/* Connects to the agent. Waits if no agent runs yet, for example during a restart. A standby first
 * waits as in rk_wait_standby(), for as long as `rekindle run` lives; the timeout begins then.
 * RK_UNAVAILABLE: no agent serves that store within the timeout. RK_DENIED: the agent belongs to
 * another user. */
RK_API int32_t rk_connect(const rk_connect_options* options, rk_agent** agent, rk_error* error);
/* Ends the connection and keeps the handle. The calls of other threads return RK_STALE, and so do
 * later calls. Not while another thread calls rk_interrupt() or rk_disconnect(). NULL does nothing.
 */
RK_API void rk_interrupt(rk_agent* agent);
/* Ends the connection with its sessions, and frees the handle. A call that another thread has begun
 * returns RK_STALE; one that begins later is an error of the caller. NULL does nothing. */
RK_API void rk_disconnect(rk_agent* agent);

/* --- weights for a worker */

/* A part of a tensor: offsets and extents in elements, one per dimension. */
typedef struct rk_box {
  /* "": the smallest tensor. Attach to it to read rk_catalog(). */
  const char* tensor;
  /* 0: the whole tensor. */
  uint32_t dimensions;
  const uint64_t* offset;
  const uint64_t* extent;
} rk_box;

typedef struct rk_attach_options {
  uint32_t size;
  /* "qwen3@41", or "qwen3" for the newest version that is ready. */
  const char* model;
  /* "tp=3/8". NULL: everything, or `boxes`. */
  const char* shard;
  /* The text of a shard spec. NULL: the built-in spec of the model's family. */
  const char* spec_json;
  /* Replaces `shard`. */
  const rk_box* boxes;
  size_t box_count;
  /* NULL: an instance with this rank only. */
  const char* instance;
  /* The same for all ranks of one start of the instance. */
  uint64_t generation;
  uint32_t rank;
  /* Number of ranks. 0: 1. */
  uint32_t world;
  /* A directory of safetensors files, for the case that no live host holds the version; or NULL. */
  const char* fallback_dir;
  /* How long to wait until the version and its sources are known. 0: 10000. */
  int64_t timeout_ms;
  /* Where the weights go. NULL: to host memory, by rk_next(). "cuda": the calling thread's current
   * CUDA device. "cuda:1". A UUID: "GPU-6f2c…". "double:0": host memory in place of a GPU, on
   * machines without one (`rekindle agent --gpu double:1`). */
  const char* device;
  /* The CUstream or cudaStream_t whose work reads the buckets. NULL: the default stream. */
  void* stream;
  /* 0: the agent chooses 64 MiB, in an update 256 MiB. At most 256 MiB. */
  uint64_t bucket_bytes;
  /* The workers of a group move to a new version together, when an update begins (rk_update,
   * `rekindle update`). rk_wait_update() then returns, and attaching to the version takes part in
   * the update. NULL: no group; the worker moves as soon as a version is ready. */
  const char* group;
  /* 1: the version is taken beside the one that serves. The session has no rank of the instance
   * before rk_begin_switch(), so the instance stays ready with the version that it has. */
  uint32_t staged;
  /* The W3C trace context that the attach belongs to: $TRACEPARENT, which `rekindle run` sets. NULL
   * or unreadable: the attach is a trace of its own. */
  const char* traceparent;
  /* With a device: take the resident copy of the version that was sealed with this key, and nothing
   * else. Such a session brings no tensors: map the blocks with rk_resident_open(), then call
   * rk_loaded(). RK_NOT_FOUND or RK_UNAVAILABLE: there is none for this worker, and the message
   * says why; attach again without a key. NULL: take none. */
  const char* resident_key;
  /* With `resident_key`: not 0: this process only reads the copy. It takes one that is sealed for
   * reading, and shares it with other workers. 0: it takes a copy for itself. */
  uint32_t resident_shared;
} rk_attach_options;

RK_API int32_t rk_attach(rk_agent* agent, const rk_attach_options* options, rk_session** session,
                         rk_error* error);

typedef struct rk_session_info {
  /* Set by the caller. */
  uint32_t size;
  const char* model;
  uint64_t version;
  uint64_t bytes_done, bytes_total;
  uint32_t tensors;
  /* The lowest source so far: "local", "adopted", "peers", "fallback". */
  const char* rung;
  /* "": the session has no device. "ipc": the agent fills buckets that this process opens.
   * "upload: WHY": this process uploads from host memory, because the agent cannot fill buckets
   * here. Before the first bucket, "ipc" may still change to "upload: WHY". */
  const char* device_path;
} rk_session_info;
/* The strings live as long as the session. If `size` ends before `bytes_done`, the call does not
 * wait for the list of the tensors, which the library reads at its first use. */
RK_API int32_t rk_info(rk_session* session, rk_session_info* info, rk_error* error);

/* A name that begins with "__rekindle_file__/" is a small file that was published with the weights
 * (config.json, tokenizer.json, …): its dtype is U8 and its data are the bytes of the file. Within
 * one array, equal shapes and offsets are at one address, so a caller with many tensors can read
 * each list once. */
typedef struct rk_tensor {
  const char* name;
  /* As in safetensors: "BF16", "F8_E4M3". */
  const char* dtype;
  uint32_t dimensions;
  /* Shape of this part of the tensor, and its offset in the whole tensor. */
  const uint64_t* shape;
  const uint64_t* offset;
  /* Shape of the whole tensor. */
  const uint64_t* full_shape;
  /* Row-major, contiguous and read-only, as long as the session lives. It points into the agent's
   * memory. A box that is not contiguous there is copied when it is handed out. NULL for a tensor
   * without elements. */
  const void* data;
  uint64_t bytes;
} rk_tensor;

/* Every tensor of the version, sorted by name, also tensors outside this session; `data` is NULL.
 * To choose boxes, attach to the smallest tensor first and read this list. The array lives as long
 * as the session. */
RK_API int32_t rk_catalog(rk_session* session, const rk_tensor** tensors, size_t* count,
                          rk_error* error);

/* The next tensors that are whole and verified, each once. RK_OK with `*count` 0: there are no
 * more. RK_TIMEOUT: none came in time. The array lives as long as the session. */
RK_API int32_t rk_next(rk_session* session, int64_t timeout_ms, const rk_tensor** tensors,
                       size_t* count, rk_error* error);

/* --- weights on a device (rk_attach_options.device): these functions replace rk_next() */

/* The number of tensors and boxes in the session, including files. Does not wait for the list of
 * the tensors. For sessions without a device, too. */
RK_API int32_t rk_tensor_count(rk_session* session, size_t* count, rk_error* error);
/* Every tensor of the session, in a fixed order; `data` is NULL. The array lives as long as the
 * session. With a device, the first call that needs the list reads it, and a second thread may call
 * rk_prefetch() meanwhile. RK_INTERNAL: the agent's answer to rk_attach() does not fit together. */
RK_API int32_t rk_tensors(rk_session* session, const rk_tensor** tensors, size_t* count,
                          rk_error* error);
/* A run of a tensor's row-major bytes. A tensor larger than a bucket comes in several parts. */
typedef struct rk_part {
  const rk_tensor* tensor;
  /* Offset in the tensor. */
  uint64_t offset_bytes;
  /* 0: a tensor without elements. */
  uint64_t bytes;
  /* Device memory, 256-byte aligned. */
  void* data;
  /* 0. */
  uint64_t reserved[2];
} rk_part;
/* The next filled bucket, in the order of arrival. Queue all reads of the bucket on the session's
 * stream before the next call: that call gives the bucket back behind them. RK_OK with `*count` 0:
 * there are no more, and the buckets' memory is free again. RK_TIMEOUT: none came in time.
 * RK_UNAVAILABLE: the device process is gone and the agent still runs; detach and attach again. (If
 * the agent is gone, RK_PEER_LOST.) The array lives as long as the session. */
RK_API int32_t rk_next_bucket(rk_session* session, int64_t timeout_ms, const rk_part** parts,
                              size_t* count, rk_error* error);
/* The place of a tensor, or of a box of it, in device memory: contiguous and row-major. */
typedef struct rk_target {
  const char* tensor;
  /* Of the box, as rk_tensor.offset. NULL: the session has one box of this tensor. */
  const uint64_t* offset;
  void* data;
  /* The size of the tensor or box. RK_INVALID if it differs. */
  uint64_t bytes;
  /* 0. */
  uint64_t reserved[2];
} rk_target;
/* Takes every bucket and copies its tensors to their targets, each bucket in one batch, on the
 * session's stream. Returns when all queued copies are done, also when it fails. (Exception: a
 * device that hangs for 10 s. The message says so.) Tensors without a target are skipped.
 * RK_NOT_FOUND: the session does not have a target's tensor; the message names it. RK_TIMEOUT: no
 * bucket came for `timeout_ms`; call again to continue, and keep the targets until then or until
 * rk_detach(). */
RK_API int32_t rk_load_into(rk_session* session, const rk_target* targets, size_t count,
                            int64_t timeout_ms, rk_error* error);

/* Copies buckets to separate memory on the device, so that the producer can go on filling them: at
 * most `bytes`, and at most a quarter of the device's free memory. A second thread calls it while
 * the first finds the targets of tensors. With tens of thousands of tensors, that takes as long as
 * the transfer of gigabytes. Nothing is lost: rk_load_into() and rk_next_bucket() begin with these
 * copies, and free their memory after use. Returns RK_OK when the limit is reached, when there are
 * no more buckets, at the timeout, when another call of this session wants buckets, and at once
 * while the caller reads a bucket of rk_next_bucket(). RK_TIMEOUT: another call used the session
 * all the time. Other errors are those of rk_next_bucket(). */
RK_API int32_t rk_prefetch(rk_session* session, uint64_t bytes, int64_t timeout_ms,
                           rk_error* error);

/* Takes every bucket into memory of its own on the device, beside what serves, and returns when all
 * are there. rk_load_into() and rk_next_bucket() then wait for nothing but copies on the device,
 * and free this memory after use. RK_EXHAUSTED: the device would have less than `reserve_bytes`
 * free; the message has the numbers. Then load at once, or detach: nobody may fill further buckets.
 * Free memory is what the device's driver reports. RK_TIMEOUT: no bucket came for `timeout_ms`;
 * call again to continue. With a timeout of 0 the call only looks for room: RK_TIMEOUT: there is.
 * RK_INVALID: the caller still reads a bucket of rk_next_bucket(); nothing has changed. Other
 * errors are those of rk_next_bucket(). */
RK_API int32_t rk_stage(rk_session* session, uint64_t reserve_bytes, int64_t timeout_ms,
                        rk_error* error);
/* For a session that was attached with `staged`: from now on it has its rank of the instance, in
 * place of the session that served, and the instance is ready when all ranks have loaded. Call it
 * before the first write to what serves. RK_INVALID: other ranks of the generation have another
 * version; nothing has changed. */
RK_API int32_t rk_begin_switch(rk_session* session, int64_t timeout_ms, rk_error* error);
/* How long the phases of an update took in this process, for `rekindle update` and rk_update().
 * `name` is declare, copy, spread, verify, apply or resume. Each call replaces the last one.
 * RK_INVALID: another name, or one twice. */
typedef struct rk_phase {
  const char* name;
  uint64_t elapsed_us;
} rk_phase;
RK_API int32_t rk_report_phases(rk_session* session, const rk_phase* phases, size_t count,
                                rk_error* error);
/* As rk_report_phases(), with the time at which each phase began, for `rekindle trace`: phase i
 * began `ago_us[i]` microseconds before this call. A phase that has taken place in several pieces
 * began with the first one. */
RK_API int32_t rk_report_phases_ago(rk_session* session, const rk_phase* phases,
                                    const uint64_t* ago_us, size_t count, rk_error* error);

/* --- parameters that outlive the worker in the memory of its device: docs/internals/resident.md */

/* Memory of a device that can outlive this process. It is freed when nobody holds it: this process
 * by rk_block_free(), the agent's keeper after rk_resident_seal(), and other workers. */
typedef struct rk_block rk_block;
/* Allocates at least `bytes` on the session's device, rounded up to a granule of the device (2 MiB
 * on GPUs). The block may outlive the session. RK_INVALID: the session has no device. RK_EXHAUSTED:
 * the device has no room. RK_UNAVAILABLE: memory of this device ends with its process. */
RK_API int32_t rk_block_allocate(rk_session* session, uint64_t bytes, rk_block** block,
                                 rk_error* error);
/* The address of the block on the device, 2 MiB-aligned on GPUs, and its size. Both stay until
 * rk_block_free(). */
RK_API int32_t rk_block_memory(rk_block* block, void** data, uint64_t* bytes, rk_error* error);
/* Not 0: this process only reads the block from now on, at the same address. On GPUs, work that
 * writes to it fails, and with it the context; on doubles the process ends by SIGSEGV. 0: it may
 * write again. No queued work may write to the block. RK_UNAVAILABLE: the driver refuses. */
RK_API int32_t rk_block_set_read_only(rk_block* block, uint32_t read_only, rk_error* error);
/* Unmaps the block in this process. No queued work may use it. NULL does nothing. */
RK_API void rk_block_free(rk_block* block);
/* The resident copy of a session that was attached with `resident_key`. `description` lives as long
 * as the session. `count`: its blocks. RK_NOT_FOUND: the session has none. */
RK_API int32_t rk_resident(rk_session* session, const void** description,
                           uint64_t* description_bytes, size_t* count, rk_error* error);
/* Maps the blocks of rk_resident(), once, in `blocks`, which has room for `count`. The caller frees
 * them. They are checked already: every byte is that of the seal. Blocks of a shared copy are for
 * reading only, as by rk_block_set_read_only(). */
RK_API int32_t rk_resident_open(rk_session* session, rk_block** blocks, size_t count,
                                rk_error* error);
/* Has the agent keep these blocks beyond the end of this process. Call it after rk_wait_commit(),
 * in a process that has written all of its parameters to them. Their next write must come after
 * rk_attach() for another version, or rk_begin_switch(), which end this; then seal them again.
 * `key` has 1 to 4096 bytes and must differ whenever the bytes may mean something else: engine,
 * shards, kind of GPU. `description` is at most 48 MiB that a successor gets. At most 64 blocks. If
 * all blocks are for reading only, workers share the copy: others take it by `resident_shared`
 * while this process lives, and their next write goes to other memory. RK_INVALID: the session is
 * not committed, or has no device. RK_UNAVAILABLE: the agent keeps none, or would not see this
 * process die. */
RK_API int32_t rk_resident_seal(rk_session* session, const char* key, const void* description,
                                uint64_t description_bytes, rk_block* const* blocks, size_t count,
                                int64_t timeout_ms, rk_error* error);

/* Reports that this rank has loaded every tensor. Does not wait. RK_INVALID: rk_next() or
 * rk_next_bucket() has not handed out all tensors yet. */
RK_API int32_t rk_loaded(rk_session* session, rk_error* error);
/* Waits until every rank of the instance has loaded the same version. Only then may the rank serve.
 * RK_UNAVAILABLE: a rank has failed; the message says which and why. Call again to wait for that
 * rank's next start. */
RK_API int32_t rk_wait_commit(rk_session* session, int64_t timeout_ms, rk_error* error);
/* Waits until the model has a version newer than this session's, or until an update of its group
 * begins. Attach again to get it, with the next generation if the instance has several ranks. */
RK_API int32_t rk_wait_update(rk_session* session, int64_t timeout_ms, uint64_t* version,
                              rk_error* error);

/* What the agent wants of this worker. */
typedef enum rk_order_kind {
  /* Stop serving, load `model` in place of the present version, and serve it. */
  RK_ORDER_SERVE = 1,
  /* Some bytes of the worker's resident copy are wrong. */
  RK_ORDER_MEND = 2
} rk_order_kind;
typedef struct rk_order {
  /* Set by the caller. */
  uint32_t size;
  /* An rk_order_kind. Another number: an order of a later release, to be answered with
   * RK_UNAVAILABLE. */
  uint32_t kind;
  uint64_t number;
  /* RK_ORDER_SERVE: "qwen3@42"; "qwen3": the newest version. */
  const char* model;
  /* RK_ORDER_MEND: names of tensors. */
  const char* const* tensors;
  size_t tensor_count;
} rk_order;
/* Waits for an order to this committed session, and fills `order`. Call it between two steps, with
 * `timeout_ms` 0 if it must not wait. The agent then gives the order when every rank that gets it
 * has called. Strings live until the next call. RK_TIMEOUT: there is none yet. RK_UNAVAILABLE: the
 * agent is older and gives no orders. */
RK_API int32_t rk_watch_order(rk_session* session, int64_t timeout_ms, rk_order* order,
                              rk_error* error);
/* Answers an order, on the session that got it, which may have ended meanwhile but is not detached.
 * `code`: RK_OK, or why the worker has not carried the order out, with a line in `why`. `phases`:
 * how long each step took. RK_STALE: the agent waits for no such answer. */
RK_API int32_t rk_order_done(rk_session* session, uint64_t number, int32_t code, const char* why,
                             const rk_phase* phases, size_t count, rk_error* error);
/* Ends the session and unmaps its tensors. NULL does nothing. */
RK_API void rk_detach(rk_session* session);

/* --- weights from a trainer */

typedef struct rk_tensor_spec {
  const char* name;
  const char* dtype;
  uint32_t dimensions;
  const uint64_t* shape;
} rk_tensor_spec;

/* Begins to publish `model_version` ("qwen3@42") with these tensors. The caller fills memory of the
 * agent's store, then commits. */
RK_API int32_t rk_publish_begin(rk_agent* agent, const char* model_version,
                                const rk_tensor_spec* tensors, size_t count,
                                rk_publication** publication, rk_error* error);
/* The memory of tensor `index`: writable and row-major, until commit or abandon. Write all of it:
 * it may still contain bytes of another version. */
RK_API int32_t rk_publish_data(rk_publication* publication, size_t index, void** data,
                               uint64_t* bytes, rk_error* error);
/* Digests the tensors and makes the version READY. Ends the publication, also when it fails.
 * RK_DENIED: the version exists with other bytes. */
RK_API int32_t rk_publish_commit(rk_publication* publication, int64_t timeout_ms, rk_error* error);
RK_API void rk_publish_abandon(rk_publication* publication);

/* Many ranks, on any hosts, publish one version together. Each has its own boxes of the tensors,
 * and no host holds more than the boxes of its ranks. */
typedef struct rk_joint_options {
  uint32_t size;
  const char* model_version;
  /* Of this process, and how many there are. */
  uint32_t rank;
  uint32_t world;
  /* How long to wait for the other ranks. 0: 600000. */
  int64_t timeout_ms;
} rk_joint_options;
/* A box of a tensor: offset and extent in elements, one per dimension. */
typedef struct rk_joint_part {
  rk_tensor_spec tensor;
  const uint64_t* offset;
  const uint64_t* extent;
} rk_joint_part;
/* Declares what this rank will write, and waits until all ranks have declared. rk_publish_commit()
 * then waits until all ranks have committed. RK_INVALID: the ranks disagree about a tensor, or
 * leave elements out; the message names tensor and ranks. RK_DENIED: another process publishes this
 * rank. RK_TIMEOUT: the message names the ranks that are missing. A rank that died may begin again,
 * with the same parts, while the others wait. */
RK_API int32_t rk_publish_begin_joint(rk_agent* agent, const rk_joint_options* options,
                                      const rk_joint_part* parts, size_t count,
                                      rk_publication** publication, rk_error* error);
/* A box of a part that this rank writes, and its memory: row-major, until commit or abandon. */
typedef struct rk_piece {
  const uint64_t* offset;
  const uint64_t* extent;
  void* data;
  uint64_t bytes;
} rk_piece;
/* Fills `pieces` with those of part `index`, at most `capacity`, and sets `count` to their number.
 * Together they are the part, or less: elements that another rank of this host also has are written
 * by one of them. `offset` and `extent` live as long as the publication. */
RK_API int32_t rk_publish_pieces(rk_publication* publication, size_t index, rk_piece* pieces,
                                 size_t capacity, size_t* count, rk_error* error);

/* --- copies into the memory of a publication, by several threads */

typedef struct rk_copies rk_copies;
typedef struct rk_copy {
  void* target;
  /* NULL: the caller has written the bytes itself. */
  const void* source;
  uint64_t bytes;
} rk_copy;
/* Starts threads that copy into memory of `publication`, until its commit or abandon. When every
 * byte of a file of the agent has been given once, it is unmapped, and the agent digests it while
 * the other copies run. Then nothing may touch its memory. Therefore give all bytes of a tensor,
 * and tensors in the order of their addresses, file by file. NULL: copies between any memory.
 * `threads`: 0: two less than the process has CPUs, at most 12. */
RK_API int32_t rk_copies_open(rk_publication* publication, uint32_t threads, rk_copies** copies,
                              rk_error* error);
/* Begins copies, and sets `number` for rk_copies_wait. The sources must stay until then.
 * RK_INVALID: a target is no memory of the publication, or was given before. */
RK_API int32_t rk_copies_put(rk_copies* copies, const rk_copy* list, size_t count, uint64_t* number,
                             rk_error* error);
/* Waits until all copies up to `number` are done. RK_TIMEOUT: some are not. */
RK_API int32_t rk_copies_wait(rk_copies* copies, uint64_t number, int64_t timeout_ms,
                              rk_error* error);
/* Drops the copies that have not begun, and waits until nothing writes. NULL does nothing. */
RK_API void rk_copies_close(rk_copies* copies);

/* --- one version to all workers of a group, by broadcast where possible */

typedef struct rk_update_options {
  uint32_t size;
  /* "qwen3@42", published before. */
  const char* model_version;
  /* NULL: all groups with workers of the model. */
  const char* group;
  /* How long to wait for the workers to attach. The update then begins without the others.
   * 0: 5000. */
  int64_t gather_ms;
  /* For the whole update. 0: 600000. */
  int64_t timeout_ms;
  /* The update also waits, within `gather_ms`, until this many workers have attached: for workers
   * that attach just before it, and may not be known to the coordinator yet. */
  uint32_t members;
} rk_update_options;
/* One phase of an update over the ranks that have reported it. */
typedef struct rk_phase_summary {
  char name[16];
  uint64_t median_us, p95_us, slowest_us;
  /* "rank 1 of i on b", cut at the end if it is longer. */
  char slowest[232];
} rk_phase_summary;
typedef struct rk_update_result {
  /* Set by the caller. */
  uint32_t size;
  /* Workers at the start of the update. */
  uint32_t members;
  /* Members that serve the version, or can. */
  uint32_t ready;
  /* Ready members that got every byte by broadcast. The others got bytes by uploads or pulls. */
  uint32_t by_broadcast;
  uint64_t elapsed_ms;
  /* In the order declare, copy, spread, verify, apply, resume. */
  uint32_t phase_count;
  rk_phase_summary phases[6];
} rk_update_result;
/* Brings the version to the group and waits for the end. RK_NOT_FOUND: there is no such version, or
 * no worker in the group. RK_UNAVAILABLE: another update of the group runs, there is no
 * coordinator, or some members are not ready in the end. In the last case the message names one
 * member and the reason, and `result` has the count; the missing members still try to load the
 * version by themselves. RK_TIMEOUT: the update goes on. */
RK_API int32_t rk_update(rk_agent* agent, const rk_update_options* options,
                         rk_update_result* result, rk_error* error);

/* --- the layouts of thousands of Python tensors in one call */

/* DLPackExchangeAPI.dltensor_from_py_object_no_sync of DLPack 1.3. It fills a DLTensor that owns
 * nothing, and returns 0, or -1 with a Python exception set. */
typedef int (*rk_dlpack_exporter)(void* py_object, void* dl_tensor);
typedef struct rk_tensor_layout {
  /* Address of the first element. 0: the producer names none. */
  uint64_t data;
  /* A DLDeviceType. */
  int32_t device_type;
  int32_t device_id;
  /* A DLDataTypeCode. */
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  uint32_t dimensions;
  /* Index of the first dimension in `shapes` and `strides`. */
  uint64_t first_dimension;
  /* 1: row-major without gaps, or without elements. */
  uint32_t contiguous;
  /* 0. */
  uint32_t reserved;
} rk_tensor_layout;

/* Describes `count` objects of the exporter's type, in order. Shapes and strides are in elements,
 * one list after another; each array has `capacity` integers. The caller holds the GIL and keeps
 * the objects alive; at least three words of each object must be readable. The exporter runs in
 * this thread. `*described` is the number of objects before the first failure. RK_INVALID: the
 * exporter has failed and left its exception set, or has given no shape. RK_EXHAUSTED: `capacity`
 * is too small. */
RK_API int32_t rk_describe_tensors(rk_dlpack_exporter exporter, void* const* objects, size_t count,
                                   rk_tensor_layout* layouts, int64_t* shapes, int64_t* strides,
                                   size_t capacity, size_t* described, rk_error* error);

#ifdef __cplusplus
}
#endif
#endif
