-- Wireshark dissector of the Service Access Layer over UDP port 54324: every message, its extensions by name, DATA and trains.
--
--   wireshark -X lua_script:margay.lua capture.pcap
--
-- or copy it to the personal Lua plugins (Help > About > Folders). Other ports: Analyze > Decode As. What the format's parsers
-- would refuse is marked as malformed, with the reason in `margay.refusal`. Tested against the golden vectors.

local PORT = 54324
local VERSION = 1
local HEADER_LEN = 20
local RESOLVABLE_LEN = 88
local DATA_HEADER_LEN = 16
local TRAIN_HEADER_LEN = 8
local DATA = 32
local FEC = 5
local SCTP = 8
local CRITICAL = 0x80
local AUTH = 0x8a
local ERROR_TEXT_MAX = 128
local PLACES_MAX = 4
local SHARINGS = { [0] = "by arrival", [1] = "by weight", [2] = "redundantly" }
-- Boxes of a chain of middleboxes, and certificates of a chain.
local BOXES_MAX, CHAIN_MAX = 8, 3
local SYN = 1
local GRANT_FLOWS_MAX = 128

local types = {
    [1] = "SYN", [2] = "SYN-ACK", [3] = "ACK", [4] = "RSYN", [5] = "RSYN-ACK", [6] = "RSYN-DONE", [7] = "FIN", [8] = "RST",
    [9] = "FAIL", [10] = "PROBE", [11] = "ERROR", [12] = "requestLock", [13] = "ackLock", [14] = "nackLock",
    [15] = "cancelLock", [16] = "ackCancel", [17] = "NOTICE", [18] = "CHANGE", [DATA] = "DATA",
}
local protocols = { [4] = "IPv4 packet", [41] = "IPv6 packet", [59] = "none" }
local extension_types = {
    [1] = "SOURCE_SERVICE", [2] = "SESSION", [3] = "ADDRESSES", [4] = "CAPABILITIES", [5] = "KEY_EXCHANGE",
    [0x86] = "CERTIFICATE", [0x87] = "CHAIN", [8] = "RENDEZVOUS", [9] = "ERROR", [AUTH] = "AUTH", [0x8b] = "COOKIE",
    [0x8c] = "STACK", [13] = "FLOW_PORT", [0x8e] = "MOVE", [15] = "STRIPE", [16] = "ARRIVALS",
    [17] = "NOTICE", [0x93] = "GRANT", [20] = "TERMS", [21] = "QUIET", [0x96] = "HANDOVER",
    [23] = "FENCE_NUMBER", [0x98] = "CHANGE", [25] = "SYN_SEEN", [26] = "LOSS", [0x9a] = "RECONFIGURATION",
    [36] = "TIMING",
    [0xcc] = "SPLICE", [0xcd] = "CUT", [0xce] = "ORDER", [0xec] = "CHAIN_ADDED",
}
local error_codes = {
    [1] = "NO_SERVICE", [2] = "REFUSED", [3] = "NOT_ALLOWED", [4] = "BAD_CERTIFICATE", [5] = "COOKIE_WANTED",
    [6] = "UNKNOWN_CRITICAL", [7] = "UNKNOWN_FLOW", [8] = "HOP_LIMIT", [9] = "OVERLOADED", [10] = "VERSION",
    [11] = "FULL_HANDSHAKE_WANTED", [12] = "UNKNOWN_ASSOCIATION", [13] = "CLOSED", [14] = "NO_COMMON_STACK",
    [15] = "KEPT_OUT",
    [16] = "LISTENER_SILENT",
    [17] = "DRAINED",
    [18] = "NOT_QUIET",
    [19] = "ELSEWHERE",
    [20] = "DEMANDED",
    [21] = "STRIPED",
    [22] = "BOX_SILENT",
    [23] = "BOX_REFUSED",
    [24] = "BOX_ANSWERED",
    [25] = "CHAIN_REQUIRED",
    [26] = "NO_ANSWER",
    [27] = "BOX_OTHER_KIND",
    [28] = "BOX_REWRITES",
    [29] = "NO_ROOM_FOR_TAG",
    [30] = "BOX_AMBIGUOUS",
    [31] = "OUTRANKED",
    [32] = "DATAGRAMS_ONLY",
    [33] = "BOX_NEEDS_FIRST",
    [34] = "BOX_UNKNOWN",
    [35] = "SYN_CHANGED",
    [84] = "BYTES_LOST",
}
local stacks = { [0] = "raw", [1] = "direct", [2] = "encap", [3] = "secure (AES-256-GCM)",
    [4] = "secure (ChaCha20-Poly1305)", [5] = "fec", [6] = "secure-fec (AES-256-GCM)",
    [7] = "secure-fec (ChaCha20-Poly1305)", [8] = "sctp", [9] = "secure-sctp (AES-256-GCM)",
    [10] = "secure-sctp (ChaCha20-Poly1305)" }
local sctp_chunks = { [3] = "SACK", [64] = "I-DATA", [194] = "I-FORWARD-TSN" }
local steps = { [1] = "propose", [2] = "request", [3] = "answer", [4] = "refuse", [5] = "confirm", [6] = "done",
    [7] = "abandon", [8] = "tell" }
local reconfiguration_steps = { [1] = "request", [2] = "answer", [3] = "refuse", [4] = "begin", [5] = "confirm",
    [6] = "done", [7] = "fence", [8] = "finish", [9] = "finished", [10] = "leave", [11] = "left", [12] = "cancel",
    [13] = "canceled", [14] = "wish", [15] = "told" }
local order_states = { [0] = "wished", [1] = "to sign", [2] = "taken", [3] = "done", [4] = "refused", [5] = "failed",
    [6] = "ended" }
local order_acts = { [1] = "insert", [2] = "remove", [3] = "replace" }
local segmentations = { [0] = "none", [1] = "TCP", [2] = "UDP" }
local ip_protocols = { [6] = "TCP", [17] = "UDP" }

local margay = Proto("margay", "Margay Service Access Layer")
local f = {
    refusal = ProtoField.string("margay.refusal", "Malformed"),
    version = ProtoField.uint8("margay.version", "Version"),
    type = ProtoField.uint8("margay.type", "Type", base.DEC, types),
    flags = ProtoField.uint8("margay.flags", "Flags", base.HEX),
    flag_resolvable = ProtoField.bool("margay.flags.resolvable", "Resolvable part present", 8, nil, 0x01),
    flag_full = ProtoField.bool("margay.flags.full", "Full handshake wanted", 8, nil, 0x02),
    flag_confirm = ProtoField.bool("margay.flags.confirm", "Answers the same type", 8, nil, 0x04),
    flag_relay = ProtoField.bool("margay.flags.relay", "Relay to reply-to", 8, nil, 0x08),
    flag_copied = ProtoField.bool("margay.flags.copied", "Others have a copy", 8, nil, 0x10),
    flag_named = ProtoField.bool("margay.flags.named", "For one host", 8, nil, 0x20),
    next_protocol = ProtoField.uint8("margay.next_protocol", "Next protocol", base.DEC, protocols),
    header_len = ProtoField.uint16("margay.header_len", "Header length", base.UNIT_STRING, { " bytes" }),
    payload_len = ProtoField.uint16("margay.payload_len", "Payload length", base.UNIT_STRING, { " bytes" }),
    dst_flow = ProtoField.uint32("margay.dst_flow", "Destination flowID", base.HEX),
    src_flow = ProtoField.uint32("margay.src_flow", "Source flowID", base.HEX),
    control_seq = ProtoField.uint32("margay.control_seq", "Control sequence number"),
    payload = ProtoField.bytes("margay.payload", "Payload"),
    padding = ProtoField.bytes("margay.padding", "Padding"),

    resolvable = ProtoField.none("margay.resolvable", "Resolvable part"),
    hop_limit = ProtoField.uint8("margay.resolvable.hop_limit", "Hop limit"),
    present = ProtoField.uint8("margay.resolvable.present", "Addresses present", base.HEX),
    has_reply_to = ProtoField.bool("margay.resolvable.present.reply_to", "Reply-to", 8, nil, 0x01),
    has_via = ProtoField.bool("margay.resolvable.present.via", "Via", 8, nil, 0x02),
    reply_to = ProtoField.ipv6("margay.resolvable.reply_to", "Reply-to"),
    reply_to_port = ProtoField.uint16("margay.resolvable.reply_to_port", "Reply-to port"),
    via = ProtoField.ipv6("margay.resolvable.via", "Via"),
    via_port = ProtoField.uint16("margay.resolvable.via_port", "Via port"),
    service = ProtoField.bytes("margay.resolvable.service", "Destination serviceID"),
    nonce = ProtoField.uint64("margay.resolvable.nonce", "Nonce", base.HEX),
    hop_tag = ProtoField.bytes("margay.resolvable.hop_tag", "Hop tag"),

    extension = ProtoField.none("margay.ext", "Extension"),
    ext_type = ProtoField.uint8("margay.ext.type", "Type", base.HEX, extension_types),
    ext_critical = ProtoField.bool("margay.ext.critical", "Critical", 8, nil, CRITICAL),
    ext_len = ProtoField.uint16("margay.ext.len", "Length", base.UNIT_STRING, { " bytes" }),
    ext_unknown = ProtoField.bytes("margay.ext.unknown", "Value of an unknown extension"),

    source_service = ProtoField.bytes("margay.source_service", "Source serviceID"),
    session = ProtoField.bytes("margay.session.id", "Session"),
    session_client = ProtoField.ipv6("margay.session.client", "Client"),
    session_client_port = ProtoField.uint16("margay.session.client_port", "Client port"),
    session_service_port = ProtoField.uint16("margay.session.service_port", "Service port"),
    session_protocol = ProtoField.uint8("margay.session.protocol", "Protocol", base.DEC, ip_protocols),
    address = ProtoField.ipv6("margay.addresses.address", "Address"),
    address_port = ProtoField.uint16("margay.addresses.port", "Port"),
    address_flags = ProtoField.uint16("margay.addresses.flags", "Flags", base.HEX),
    stacks = ProtoField.uint32("margay.capabilities.stacks", "Stacks", base.HEX),
    mtu = ProtoField.uint16("margay.capabilities.mtu", "Largest datagram", base.UNIT_STRING, { " bytes" }),
    host_id = ProtoField.bytes("margay.key_exchange.host_id", "Host-ID"),
    new_assoc_id = ProtoField.uint32("margay.key_exchange.assoc_id", "Association wanted", base.HEX),
    noise = ProtoField.bytes("margay.key_exchange.message", "Noise message"),
    chain = ProtoField.bytes("margay.certificate.chain", "Certificate chain"),
    chain_answer = ProtoField.bool("margay.chain.is_answer", "Answers a SYN's", 8, nil, 0x01),
    chain_shared = ProtoField.uint8("margay.chain.shared", "Certificates that are those of CERTIFICATE"),
    chain_failed_at = ProtoField.uint8("margay.chain.failed_at", "Failed at box"),
    chain_destination = ProtoField.bytes("margay.chain.destination", "Destination serviceID"),
    chain_time = ProtoField.uint64("margay.chain.time_s", "Signed at, in seconds since 1970"),
    chain_host_key = ProtoField.bytes("margay.chain.host_key", "Host key"),
    chain_signature = ProtoField.bytes("margay.chain.signature", "Signature"),
    chain_box = ProtoField.bytes("margay.chain.box", "Box"),
    chain_box_flags = ProtoField.uint8("margay.chain.box_flags", "Flags", base.HEX),
    chain_added_by = ProtoField.uint8("margay.chain.box_added_by", "Added by the host of box"),
    chain_host = ProtoField.bytes("margay.chain.host", "Host of a box that was passed"),
    chain_certificates = ProtoField.bytes("margay.chain.certificates", "Certificates"),
    rendezvous = ProtoField.ipv6("margay.rendezvous.address", "Rendezvous"),
    rendezvous_port = ProtoField.uint16("margay.rendezvous.port", "Rendezvous port"),
    error_code = ProtoField.uint16("margay.error.code", "Code", base.DEC, error_codes),
    error_text = ProtoField.string("margay.error.text", "Text"),
    assoc_id = ProtoField.uint32("margay.auth.assoc_id", "Association", base.HEX),
    epoch = ProtoField.uint32("margay.auth.epoch", "Epoch"),
    receiver_epoch = ProtoField.uint32("margay.auth.receiver_epoch", "Epoch of the receiver"),
    tag = ProtoField.bytes("margay.auth.tag", "Tag"),
    cookie = ProtoField.bytes("margay.cookie", "Cookie"),
    stack = ProtoField.uint8("margay.stack", "Stack", base.DEC, stacks),
    demands = ProtoField.bool("margay.stack.demands", "Demands a sealed flow", 8, nil, 0x01),
    change_step = ProtoField.uint8("margay.change.step", "Step", base.DEC, steps),
    change_stack = ProtoField.uint8("margay.change.stack", "Stack", base.DEC, stacks),
    change_demands = ProtoField.bool("margay.change.demands", "Demands a sealed flow", 8, nil, 0x01),
    change_number = ProtoField.uint32("margay.change.number", "Change"),
    give_up_after = ProtoField.uint32("margay.terms.give_up_after_ms", "Silent hosts are given up after, in ms"),
    handover_ticket = ProtoField.bytes("margay.handover.ticket", "Ticket"),
    handover_giver = ProtoField.bytes("margay.handover.giver", "Giver"),
    handover_taker = ProtoField.bytes("margay.handover.taker", "Taker"),
    handover_address = ProtoField.ipv6("margay.handover.address", "Address"),
    handover_port = ProtoField.uint16("margay.handover.port", "Port"),
    quiet = ProtoField.uint32("margay.quiet.quiet_ms", "Ends if nothing was carried for", base.UNIT_STRING, { " ms" }),
    loss_basis = ProtoField.uint32("margay.loss.basis", "Counted from this change on, if not zero"),
    loss_expected = ProtoField.uint32("margay.loss.expected", "Datagrams that should have come"),
    loss_sent = ProtoField.uint32("margay.loss.sent", "Datagrams sent"),
    loss_received = ProtoField.uint32("margay.loss.received", "Datagrams that have come"),
    loss_gaps = ProtoField.uint32("margay.loss.gaps", "Gaps"),
    timing_at = ProtoField.uint32("margay.timing.at_us", "Sent at, in microseconds"),
    timing_jitter = ProtoField.uint32("margay.timing.jitter_us", "Jitter in microseconds, if not all ones"),
    timing_judged = ProtoField.uint32("margay.timing.judged", "Datagrams with a number"),
    timing_late = ProtoField.uint32("margay.timing.late", "Of these behind a later one"),
    fence_number = ProtoField.uint64("margay.fence_number", "Fence number"),
    syn_seen = ProtoField.bytes("margay.syn_seen", "Digest of the SYN"),
    reconfiguration_step = ProtoField.uint8("margay.reconfiguration.step", "Step", base.DEC, reconfiguration_steps),
    reconfiguration_number = ProtoField.uint32("margay.reconfiguration.number", "Reconfiguration"),
    reconfiguration_host = ProtoField.bytes("margay.reconfiguration.host", "Right anchor"),
    reconfiguration_address = ProtoField.ipv6("margay.reconfiguration.address", "Address"),
    reconfiguration_port = ProtoField.uint16("margay.reconfiguration.port", "Port"),
    splice_host = ProtoField.bytes("margay.splice.host", "Other end"),
    splice_session = ProtoField.bytes("margay.splice.session", "Left session"),
    splice_service = ProtoField.bytes("margay.splice.service", "Name of the right session"),
    splice_unread = ProtoField.uint32("margay.splice.unread", "First byte not read"),
    splice_written = ProtoField.uint32("margay.splice.written", "First byte not written"),
    splice_timestamp = ProtoField.uint32("margay.splice.timestamp", "Clock (ms)"),
    splice_peer_scale = ProtoField.uint8("margay.splice.peer_scale", "Window scale of the peer"),
    splice_own_scale = ProtoField.uint8("margay.splice.own_scale", "Window scale"),
    splice_has_sack = ProtoField.bool("margay.splice.has_sack", "Selective acknowledgements", 8, nil, 0x02),
    order_state = ProtoField.uint8("margay.order.state", "State", base.DEC, order_states),
    order_act = ProtoField.uint8("margay.order.act", "Act", base.DEC, order_acts),
    order_session = ProtoField.bytes("margay.order.session", "Session"),
    order_service = ProtoField.bytes("margay.order.service", "Box"),
    order_other = ProtoField.bytes("margay.order.other", "Other box"),
    order_start = ProtoField.uint64("margay.order.start", "Start of the client's agent"),
    order_said_at_ms = ProtoField.uint32("margay.order.said_at_ms", "Said at (ms)"),
    order_host_key = ProtoField.bytes("margay.order.host_key", "Key of the sender"),
    order_signature = ProtoField.bytes("margay.order.signature", "Signature"),
    cut_number = ProtoField.uint32("margay.cut.number", "First byte by the new way"),
    cut_is_closed = ProtoField.bool("margay.cut.is_closed", "Closed before", 8, nil, 0x01),
    cut_has_heard = ProtoField.bool("margay.cut.has_heard", "The other cut is known", 8, nil, 0x02),
    flow_port = ProtoField.uint16("margay.flow_port.port", "Flow port"),
    starts = ProtoField.bool("margay.flow_port.starts", "Sends direct from here on", 8, nil, 0x01),
    move_number = ProtoField.uint32("margay.move.number", "Location"),
    move_token = ProtoField.bytes("margay.move.token", "Token"),
    move_challenge = ProtoField.bytes("margay.move.challenge", "Challenge"),
    move_address = ProtoField.ipv6("margay.move.address", "Address"),
    move_port = ProtoField.uint16("margay.move.port", "Port"),
    move_flags = ProtoField.uint16("margay.move.flags", "Flags", base.HEX),
    stripe_number = ProtoField.uint32("margay.stripe.number", "Question"),
    stripe_place = ProtoField.uint8("margay.stripe.place", "Place"),
    stripe_ends = ProtoField.bool("margay.stripe.flags.ends", "Several pairs no more", 8, nil, 0x01),
    stripe_leads = ProtoField.bool("margay.stripe.flags.leads", "The sender says which pairs", 8, nil, 0x02),
    stripe_plain = ProtoField.bool("margay.stripe.flags.plain", "Plain by this place", 8, nil, 0x04),
    stripe_fec = ProtoField.bool("margay.stripe.flags.fec", "Repairs by this place", 8, nil, 0x08),
    stripe_sharing = ProtoField.uint8("margay.stripe.sharing", "Shared out", nil, SHARINGS),
    stripe_weight = ProtoField.uint8("margay.stripe.weight", "Weight of the place"),
    arrivals_number = ProtoField.uint32("margay.arrivals.number", "Report"),
    arrivals_place = ProtoField.uint8("margay.arrivals.place", "Place"),
    arrivals_packet_number = ProtoField.uint32("margay.arrivals.packet_number", "Last train"),
    arrivals_at = ProtoField.uint32("margay.arrivals.at_us", "Came at, in microseconds"),
    arrivals_bytes = ProtoField.uint32("margay.arrivals.bytes", "Bytes so far"),
    notice_epoch = ProtoField.uint32("margay.notice.epoch", "Epoch"),
    notice_sequence = ProtoField.uint32("margay.notice.sequence", "Sequence number"),
    notice_until = ProtoField.uint64("margay.notice.until_s", "Until, in seconds since 1970"),
    notice_bits = ProtoField.uint16("margay.notice.bits", "Bits of the prefix"),
    notice_withdrawn = ProtoField.bool("margay.notice.flags.withdrawn", "Served no longer", 8, nil, 0x01),
    notice_prefix = ProtoField.bytes("margay.notice.prefix", "Prefix"),
    notice_host_key = ProtoField.bytes("margay.notice.host_key", "Host key"),
    notice_signature = ProtoField.bytes("margay.notice.signature", "Signature"),
    grant_first_flow = ProtoField.uint32("margay.grant.first_flow", "First flowID", base.HEX),
    grant_port = ProtoField.uint16("margay.grant.port", "Flow port"),
    grant_count = ProtoField.uint16("margay.grant.count", "Flows"),
    grant_lifetime = ProtoField.uint16("margay.grant.lifetime_ms", "Lifetime", base.UNIT_STRING, { " ms" }),

    data_stack = ProtoField.uint8("margay.data.stack", "Stack", base.DEC, stacks),
    data_flags = ProtoField.uint8("margay.data.flags", "Flags", base.HEX),
    data_fence = ProtoField.bool("margay.data.flags.fence", "Fence: the last before direct packets", 8, nil, 0x01),
    data_repair = ProtoField.bool("margay.data.flags.repair", "Repair of a block", 8, nil, 0x04),
    data_beside = ProtoField.bool("margay.data.flags.beside", "Beside: the flow is sent direct", 8, nil, 0x02),
    packet_number = ProtoField.uint32("margay.data.packet_number", "Packet number (low 32 bits)"),
    index = ProtoField.uint16("margay.data.index", "Chunk"),
    count = ProtoField.uint16("margay.data.count", "Chunks of the train"),
    chunk = ProtoField.bytes("margay.data.chunk", "Chunk"),
    sctp_chunk = ProtoField.bytes("margay.sctp.chunk", "Chunk of SCTP"),
    sctp_type = ProtoField.uint8("margay.sctp.type", "Type", base.DEC, sctp_chunks),
    sctp_tsn = ProtoField.uint32("margay.sctp.tsn", "TSN"),
    sctp_mid = ProtoField.uint32("margay.sctp.mid", "Message identifier"),
    sctp_cumulative = ProtoField.uint32("margay.sctp.cumulative", "Cumulative TSN"),
    train = ProtoField.none("margay.train", "Train"),
    gso = ProtoField.uint8("margay.train.gso", "Segmentation", base.DEC, segmentations),
    train_flags = ProtoField.uint8("margay.train.flags", "Flags", base.HEX),
    partial = ProtoField.bool("margay.train.flags.partial", "Transport checksum is partial", 8, nil, 0x01),
    segment_size = ProtoField.uint16("margay.train.segment_size", "Segment size", base.UNIT_STRING, { " bytes" }),
    inner_len = ProtoField.uint32("margay.train.inner_len", "Inner packet", base.UNIT_STRING, { " bytes" }),
}
margay.fields = f

local malformed = ProtoExpert.new("margay.malformed", "Malformed", expert.group.MALFORMED, expert.severity.ERROR)
local unknown_critical = ProtoExpert.new(
    "margay.unknown_critical", "Critical extension that version 1 does not know: is answered with ERROR UNKNOWN_CRITICAL",
    expert.group.PROTOCOL, expert.severity.WARN)
margay.experts = { malformed, unknown_critical }

local inner = { [4] = Dissector.get("ip"), [6] = Dissector.get("ipv6") }

-- Says why the format's parsers refuse the datagram. Nothing after it is read.
local function refuse(tree, pinfo, why)
    tree:add(f.refusal, why):set_generated()
    tree:add_proto_expert_info(malformed, "Malformed: " .. why)
    pinfo.cols.info:append(" [Malformed: " .. why .. "]")
    return false
end

-- RFC 3629: no overlong forms, no surrogates, nothing beyond U+10FFFF.
local function is_utf8(text)
    local at, len = 1, #text
    while at <= len do
        local lead = text:byte(at)
        local more, low, high = 0, 0x80, 0xbf
        if lead >= 0xc2 and lead <= 0xdf then
            more = 1
        elseif lead >= 0xe0 and lead <= 0xef then
            more = 2
            if lead == 0xe0 then low = 0xa0 elseif lead == 0xed then high = 0x9f end
        elseif lead >= 0xf0 and lead <= 0xf4 then
            more = 3
            if lead == 0xf0 then low = 0x90 elseif lead == 0xf4 then high = 0x8f end
        elseif lead >= 0x80 then
            return false
        end
        for step = 1, more do
            local byte = text:byte(at + step)
            if not byte or byte < low or byte > high then return false end
            low, high = 0x80, 0xbf
        end
        at = at + 1 + more
    end
    return true
end

local function is_mapped(range)
    return range:bytes():tohex():sub(1, 24):lower() == "00000000000000000000ffff"
end

-- An address of sixteen bytes, IPv4 as v4-mapped, and a port.
local function socket_text(address, port)
    if is_mapped(address) then
        return tostring(address(12, 4):ipv4()) .. ":" .. port:uint()
    end
    return "[" .. tostring(address:ipv6()) .. "]:" .. port:uint()
end

local function add_socket(tree, address_field, port_field, address, port)
    tree:add(address_field, address):append_text("  " .. socket_text(address, port))
    tree:add(port_field, port)
end

local function add_bytes(tree, field, range_of, at, len)
    if len > 0 then tree:add(field, range_of(at, len)) end
end

-- How each extension's value is read: `len` is what its length must be, `add` puts it into the tree and may say what is wrong
-- (it is given the message's type, too).
-- CHAIN, and CHAIN_ADDED, in which boxes say who has added them.
local function add_chain(tree, value, len, is_with_added)
    local count = value(1, 1):uint()
    if count < 1 or count > BOXES_MAX or value(0, 1):uint() > 1 or value(2, 1):uint() > CHAIN_MAX
        or value(3, 1):uint() > count or len < 140 + 16 * count then
        return "no chain of 1 to 8 boxes"
    end
    tree:add(f.chain_answer, value(0, 1))
    tree:add(f.chain_shared, value(2, 1))
    tree:add(f.chain_failed_at, value(3, 1))
    tree:add(f.chain_destination, value(4, 32))
    tree:add(f.chain_time, value(36, 8))
    tree:add(f.chain_host_key, value(44, 32))
    tree:add(f.chain_signature, value(76, 64))
    local at, passed, ahead, ended = 140, 0, false, false
    local behind, was_passed, has_added = 0, {}, false
    for number = 1, count do
        local flags = value(at + 12, 1):uint()
        local is_left_out, is_passed = math.floor(flags / 4) % 2 == 1, math.floor(flags / 8) % 2 == 1
        if flags > 31 or is_left_out and is_passed or value(at + 14, 2):uint() ~= 0 then
            return "a box has flags that none has"
        end
        local is_added, added_by = math.floor(flags / 2) % 2 == 1, value(at + 13, 1):uint()
        if (added_by ~= 0) ~= (is_added and value(0, 1):uint() == 0)
            or added_by ~= 0 and (added_by < behind or not was_passed[added_by]) then
            return "a box was added by the host of none that comes before it"
        end
        was_passed[number] = is_passed
        if not is_added then behind = number end
        has_added = has_added or added_by ~= 0
        if ahead and (is_left_out or is_passed) then return "a box was passed before one that is ahead of it" end
        if ended then return "a box comes after the one at which the session ends" end
        ended = flags > 15
        ahead = not is_left_out and not is_passed
        if is_passed then passed = passed + 1 end
        tree:add(f.chain_box, value(at, 12))
        tree:add(f.chain_box_flags, value(at + 12, 1))
        if added_by ~= 0 then tree:add(f.chain_added_by, value(at + 13, 1)) end
        at = at + 16
    end
    if has_added ~= is_with_added then return "boxes say who has added them in CHAIN_ADDED, and nowhere else" end
    if len < at + 16 * passed then return "a box was passed at no host" end
    for _ = 1, passed do
        tree:add(f.chain_host, value(at, 16))
        at = at + 16
    end
    add_bytes(tree, f.chain_certificates, value, at, len - at)
end

local readers = {
    [1] = { len = 32, add = function(tree, value) tree:add(f.source_service, value(0, 32)) end },
    [2] = { len = 40, add = function(tree, value)
        tree:add(f.session, value(0, 16))
        add_socket(tree, f.session_client, f.session_client_port, value(16, 16), value(32, 2))
        tree:add(f.session_service_port, value(34, 2))
        tree:add(f.session_protocol, value(36, 1))
    end },
    [3] = { each = 20, add = function(tree, value, len)
        for at = 0, len - 20, 20 do
            add_socket(tree, f.address, f.address_port, value(at, 16), value(at + 16, 2))
            tree:add(f.address_flags, value(at + 18, 2))
        end
    end },
    [4] = { len = 8, add = function(tree, value)
        local bits = tree:add(f.stacks, value(0, 4))
        local names = {}
        for stack = 0, 31 do
            if value(0, 4):bitfield(31 - stack, 1) == 1 then names[#names + 1] = stacks[stack] or tostring(stack) end
        end
        bits:append_text(" (" .. table.concat(names, ", ") .. ")")
        tree:add(f.mtu, value(4, 2))
    end },
    [5] = { least = 20, add = function(tree, value, len)
        tree:add(f.host_id, value(0, 16))
        tree:add(f.new_assoc_id, value(16, 4))
        add_bytes(tree, f.noise, value, 20, len - 20)
    end },
    [0x86] = { least = 0, add = function(tree, value, len) add_bytes(tree, f.chain, value, 0, len) end },
    [0x87] = { least = 140, add = function(tree, value, len) return add_chain(tree, value, len, false) end },
    [0xec] = { least = 140, add = function(tree, value, len) return add_chain(tree, value, len, true) end },
    [8] = { len = 20, add = function(tree, value)
        add_socket(tree, f.rendezvous, f.rendezvous_port, value(0, 16), value(16, 2))
    end },
    [9] = { least = 4, add = function(tree, value, len)
        tree:add(f.error_code, value(0, 2))
        if len - 4 > ERROR_TEXT_MAX then return "the text is longer than 128 bytes" end
        if len > 4 then
            if not is_utf8(value(4, len - 4):raw()) then return "the text is not UTF-8" end
            tree:add_packet_field(f.error_text, value(4, len - 4), ENC_UTF_8 + ENC_NA)
        end
    end },
    [AUTH] = { len = 28, add = function(tree, value)
        tree:add(f.assoc_id, value(0, 4))
        tree:add(f.epoch, value(4, 4))
        tree:add(f.receiver_epoch, value(8, 4))
        tree:add(f.tag, value(12, 16))
    end },
    [0x8b] = { len = 24, add = function(tree, value) tree:add(f.cookie, value(0, 24)) end },
    [0x8c] = { len = 4, add = function(tree, value)
        tree:add(f.stack, value(0, 1))
        tree:add(f.demands, value(1, 1))
    end },
    [0x98] = { len = 8, add = function(tree, value)
        if not steps[value(0, 1):uint()] then return "unknown step" end
        tree:add(f.change_step, value(0, 1))
        tree:add(f.change_stack, value(1, 1))
        tree:add(f.change_demands, value(2, 1))
        tree:add(f.change_number, value(4, 4))
    end },
    [20] = { len = 4, add = function(tree, value) tree:add(f.give_up_after, value(0, 4)) end },
    [0x96] = { len = 68, add = function(tree, value)
        tree:add(f.handover_ticket, value(0, 16))
        tree:add(f.handover_giver, value(16, 16))
        tree:add(f.handover_taker, value(32, 16))
        add_socket(tree, f.handover_address, f.handover_port, value(48, 16), value(64, 2))
    end },
    [21] = { len = 4, add = function(tree, value) tree:add(f.quiet, value(0, 4)) end },
    [23] = { len = 8, add = function(tree, value) tree:add(f.fence_number, value(0, 8)) end },
    [25] = { len = 32, add = function(tree, value) tree:add(f.syn_seen, value(0, 32)) end },
    [26] = { len = 20, add = function(tree, value)
        tree:add(f.loss_basis, value(0, 4))
        tree:add(f.loss_sent, value(4, 4))
        tree:add(f.loss_expected, value(8, 4))
        tree:add(f.loss_received, value(12, 4))
        tree:add(f.loss_gaps, value(16, 4))
    end },
    [36] = { len = 16, add = function(tree, value)
        tree:add(f.timing_at, value(0, 4))
        tree:add(f.timing_jitter, value(4, 4))
        tree:add(f.timing_judged, value(8, 4))
        tree:add(f.timing_late, value(12, 4))
    end },
    [0x9a] = { len = 44, add = function(tree, value)
        if not reconfiguration_steps[value(0, 1):uint()] then return "unknown step" end
        tree:add(f.reconfiguration_step, value(0, 1))
        tree:add(f.reconfiguration_number, value(4, 4))
        tree:add(f.reconfiguration_host, value(8, 16))
        add_socket(tree, f.reconfiguration_address, f.reconfiguration_port, value(24, 16), value(40, 2))
    end },
    [0xcc] = { len = 96, add = function(tree, value)
        for at = 64, 80, 16 do
            if value(at + 12, 1):uint() > 14 or value(at + 13, 1):uint() > 14 then return "no window scale" end
        end
        tree:add(f.splice_host, value(0, 16))
        tree:add(f.splice_session, value(16, 16))
        tree:add(f.splice_service, value(32, 32))
        for at = 64, 80, 16 do
            tree:add(f.splice_unread, value(at, 4))
            tree:add(f.splice_written, value(at + 4, 4))
            tree:add(f.splice_peer_scale, value(at + 12, 1))
            tree:add(f.splice_own_scale, value(at + 13, 1))
            if value(at + 14, 1):uint() % 2 == 1 then tree:add(f.splice_timestamp, value(at + 8, 4)) end
            tree:add(f.splice_has_sack, value(at + 14, 1))
        end
    end },
    [0xcd] = { len = 8, add = function(tree, value)
        tree:add(f.cut_number, value(0, 4))
        tree:add(f.cut_is_closed, value(4, 1))
        tree:add(f.cut_has_heard, value(4, 1))
    end },
    [0xce] = { len = 152, add = function(tree, value)
        if not order_states[value(0, 1):uint()] then return "unknown state of an order" end
        if not order_acts[value(1, 1):uint()] then return "unknown act of an order" end
        tree:add(f.order_state, value(0, 1))
        tree:add(f.order_act, value(1, 1))
        tree:add(f.order_session, value(4, 16))
        tree:add(f.order_service, value(20, 12))
        tree:add(f.order_other, value(32, 12))
        tree:add(f.order_start, value(44, 8))
        tree:add(f.order_said_at_ms, value(52, 4))
        tree:add(f.order_host_key, value(56, 32))
        tree:add(f.order_signature, value(88, 64))
    end },
    [13] = { len = 4, add = function(tree, value)
        tree:add(f.flow_port, value(0, 2))
        tree:add(f.starts, value(2, 1))
    end },
    [0x8e] = { len = 40, add = function(tree, value)
        tree:add(f.move_number, value(0, 4))
        tree:add(f.move_token, value(4, 8))
        tree:add(f.move_challenge, value(12, 8))
        add_socket(tree, f.move_address, f.move_port, value(20, 16), value(36, 2))
        tree:add(f.move_flags, value(38, 2))
    end },
    [15] = { len = 8, add = function(tree, value)
        if value(4, 1):uint() >= PLACES_MAX then return "a place that no flow has" end
        tree:add(f.stripe_number, value(0, 4))
        tree:add(f.stripe_place, value(4, 1))
        tree:add(f.stripe_ends, value(5, 1))
        tree:add(f.stripe_leads, value(5, 1))
        tree:add(f.stripe_plain, value(5, 1))
        tree:add(f.stripe_fec, value(5, 1))
        tree:add(f.stripe_sharing, value(6, 1))
        tree:add(f.stripe_weight, value(7, 1))
    end },
    [16] = { least = 4, add = function(tree, value, len)
        if (len - 4) % 16 ~= 0 then return "not a whole number of places" end
        tree:add(f.arrivals_number, value(0, 4))
        local least = 0
        for at = 4, len - 16, 16 do
            local place = value(at, 1):uint()
            if place >= PLACES_MAX then return "a place that no flow has" end
            if place < least then return "places out of order" end
            least = place + 1
            tree:add(f.arrivals_place, value(at, 1))
            tree:add(f.arrivals_packet_number, value(at + 4, 4))
            tree:add(f.arrivals_at, value(at + 8, 4))
            tree:add(f.arrivals_bytes, value(at + 12, 4))
        end
    end },
    [17] = { len = 148, add = function(tree, value)
        if value(16, 2):uint() > 256 then return "a prefix is longer than a name" end
        tree:add(f.notice_epoch, value(0, 4))
        tree:add(f.notice_sequence, value(4, 4))
        tree:add(f.notice_until, value(8, 8))
        tree:add(f.notice_bits, value(16, 2))
        tree:add(f.notice_withdrawn, value(18, 1))
        tree:add(f.notice_prefix, value(20, 32))
        tree:add(f.notice_host_key, value(52, 32))
        tree:add(f.notice_signature, value(84, 64))
    end },
    [0x93] = { len = 12, add = function(tree, value, _, kind)
        local first_flow, port, count = value(0, 4):uint(), value(4, 2):uint(), value(6, 2):uint()
        if count < 1 or count > GRANT_FLOWS_MAX then return "a grant is of 1 to 128 flows" end
        if first_flow == 0 or first_flow + count - 1 > 0xffffffff then return "flows without a number" end
        -- Of a SYN, each flow has a port of its own.
        if port == 0 or kind == SYN and port + count - 1 > 0xffff then return "flows without a port" end
        tree:add(f.grant_first_flow, value(0, 4))
        tree:add(f.grant_port, value(4, 2))
        tree:add(f.grant_count, value(6, 2))
        tree:add(f.grant_lifetime, value(8, 2))
    end },
}

local function has_length(reader, len)
    if reader.len then return len == reader.len end
    if reader.each then return len % reader.each == 0 end
    return len >= reader.least
end

local function dissect_value(tree, pinfo, kind, tvb, at, len)
    local reader = readers[kind]
    if not reader then
        add_bytes(tree, f.ext_unknown, function(from, n) return tvb(at + from, n) end, 0, len)
        if kind >= CRITICAL then tree:add_proto_expert_info(unknown_critical) end
        return true
    end
    if not has_length(reader, len) then return refuse(tree, pinfo, "the value has the wrong length") end
    local why = reader.add(tree, function(from, n) return tvb(at + from, n) end, len, tvb(1, 1):uint())
    if why then return refuse(tree, pinfo, why) end
    return true
end

local function dissect_extensions(tvb, pinfo, tree, at, until_)
    local seen = {}
    while at < until_ do
        if until_ - at < 4 then return refuse(tree, pinfo, "an extension is cut short") end
        local kind, len = tvb(at, 1):uint(), tvb(at + 2, 2):uint()
        local taken = 4 + len + (-len) % 4
        if at + taken > until_ then return refuse(tree, pinfo, "an extension is cut short") end
        local name = extension_types[kind] or string.format("unknown (0x%02x)", kind)
        local branch = tree:add(f.extension, tvb(at, taken))
        branch:set_text("Extension: " .. name)
        branch:add(f.ext_type, tvb(at, 1))
        branch:add(f.ext_critical, tvb(at, 1))
        branch:add(f.ext_len, tvb(at + 2, 2))
        if not dissect_value(branch, pinfo, kind, tvb, at + 4, len) then return false end
        if seen[kind] then return refuse(branch, pinfo, "an extension comes twice") end
        if seen[AUTH] then return refuse(branch, pinfo, "an extension comes after AUTH") end
        seen[kind] = true
        at = at + taken
    end
    return true
end

local function dissect_resolvable(tvb, tree)
    local at = HEADER_LEN
    local branch = tree:add(f.resolvable, tvb(at, RESOLVABLE_LEN))
    branch:add(f.hop_limit, tvb(at, 1))
    local present = branch:add(f.present, tvb(at + 1, 1))
    present:add(f.has_reply_to, tvb(at + 1, 1))
    present:add(f.has_via, tvb(at + 1, 1))
    local bits = tvb(at + 1, 1):uint()
    if bits % 2 == 1 then add_socket(branch, f.reply_to, f.reply_to_port, tvb(at + 4, 16), tvb(at + 2, 2)) end
    if bits % 4 >= 2 then add_socket(branch, f.via, f.via_port, tvb(at + 24, 16), tvb(at + 20, 2)) end
    branch:add(f.service, tvb(at + 40, 32))
    branch:add(f.nonce, tvb(at + 72, 8))
    branch:add(f.hop_tag, tvb(at + 80, 8))
end

-- An IP packet of a program. It is dissected as such; that it may be odd itself is not this format's fault.
local function dissect_inner(tvb, pinfo, root, at, len)
    local dissector = len > 0 and inner[math.floor(tvb(at, 1):uint() / 16)]
    if not dissector then return end
    pinfo.cols.info:append("  ")
    pinfo.cols.info:fence()
    pcall(function() dissector:call(tvb(at, len):tvb(), pinfo, root) end)
    pinfo.cols.protocol = "Margay"
end

local function dissect_header(tvb, tree)
    tree:add(f.version, tvb(0, 1))
    tree:add(f.type, tvb(1, 1))
    local flags = tree:add(f.flags, tvb(2, 1))
    local known = { f.flag_resolvable, f.flag_full, f.flag_confirm, f.flag_relay, f.flag_copied, f.flag_named }
    for _, flag in ipairs(known) do flags:add(flag, tvb(2, 1)) end
    tree:add(f.next_protocol, tvb(3, 1))
    tree:add(f.header_len, tvb(4, 2))
    tree:add(f.payload_len, tvb(6, 2))
    tree:add(f.dst_flow, tvb(8, 4))
    tree:add(f.src_flow, tvb(12, 4))
    tree:add(f.control_seq, tvb(16, 4))
end

local function dissect_message(tvb, pinfo, tree, root)
    local len = tvb:reported_len()
    if len < HEADER_LEN then return refuse(tree, pinfo, "too short for a header") end
    dissect_header(tvb, tree)
    local flow = string.format(" %08x > %08x", tvb(12, 4):uint(), tvb(8, 4):uint())
    pinfo.cols.info:append(flow)
    tree:append_text(flow)
    local header_len, payload_len = tvb(4, 2):uint(), tvb(6, 2):uint()
    if header_len < HEADER_LEN then return refuse(tree, pinfo, "the header length is less than 20") end
    if header_len + payload_len > len then
        return refuse(tree, pinfo, "header and payload are longer than the datagram")
    end
    if header_len % 4 ~= 0 then return refuse(tree, pinfo, "the header length is not a multiple of 4") end
    local at = HEADER_LEN
    if tvb(2, 1):uint() % 2 == 1 then
        if header_len < HEADER_LEN + RESOLVABLE_LEN then
            return refuse(tree, pinfo, "the resolvable part is cut short")
        end
        dissect_resolvable(tvb, tree)
        at = at + RESOLVABLE_LEN
    end
    if not dissect_extensions(tvb, pinfo, tree, at, header_len) then return false end
    local padding = len - header_len - payload_len
    if payload_len > 0 then tree:add(f.payload, tvb(header_len, payload_len)) end
    if padding > 0 then tree:add(f.padding, tvb(header_len + payload_len, padding)) end
    local next_protocol = tvb(3, 1):uint()
    if next_protocol == 4 or next_protocol == 41 then dissect_inner(tvb, pinfo, root, header_len, payload_len) end
    return true
end

local function dissect_train(tvb, pinfo, tree)
    if tvb:reported_len() < DATA_HEADER_LEN + TRAIN_HEADER_LEN then
        return refuse(tree, pinfo, "the train header is cut short")
    end
    local at = DATA_HEADER_LEN
    local branch = tree:add(f.train, tvb(at, TRAIN_HEADER_LEN))
    branch:add(f.gso, tvb(at, 1))
    branch:add(f.train_flags, tvb(at + 1, 1)):add(f.partial, tvb(at + 1, 1))
    branch:add(f.segment_size, tvb(at + 2, 2))
    branch:add(f.inner_len, tvb(at + 4, 4))
    local gso = tvb(at, 1):uint()
    if not segmentations[gso] then return refuse(branch, pinfo, "unknown segmentation") end
    if gso ~= 0 and tvb(at + 2, 2):uint() == 0 then return refuse(branch, pinfo, "segments have no size") end
    return true
end

-- A row of chunks as RFC 9260 and RFC 8260 have them, without their common header.
local function dissect_sctp(tvb, pinfo, tree)
    local len = tvb:reported_len()
    local at = DATA_HEADER_LEN
    while at < len do
        if len - at < 4 then return refuse(tree, pinfo, "a chunk of SCTP is cut short") end
        local kind, chunk_len = tvb(at, 1):uint(), tvb(at + 2, 2):uint()
        local is_within = chunk_len >= 4 and chunk_len <= len - at
        if not is_within then return refuse(tree, pinfo, "a chunk of SCTP has a wrong length") end
        local branch = tree:add(f.sctp_chunk, tvb(at, chunk_len))
        branch:append_text(", " .. (sctp_chunks[kind] or "unknown"))
        branch:add(f.sctp_type, tvb(at, 1))
        if kind == 64 and chunk_len >= 20 then
            branch:add(f.sctp_tsn, tvb(at + 4, 4))
            branch:add(f.sctp_mid, tvb(at + 12, 4))
            branch:add(f.packet_number, tvb(at + 16, 4))
        elseif (kind == 3 or kind == 194) and chunk_len >= 8 then
            branch:add(f.sctp_cumulative, tvb(at + 4, 4))
        end
        at = at + chunk_len + (4 - chunk_len % 4) % 4
    end
    return true
end

local function dissect_data(tvb, pinfo, tree, root)
    local len = tvb:reported_len()
    if len < DATA_HEADER_LEN then return refuse(tree, pinfo, "too short for a header") end
    tree:add(f.version, tvb(0, 1))
    tree:add(f.type, tvb(1, 1))
    tree:add(f.data_stack, tvb(2, 1))
    local flags = tree:add(f.data_flags, tvb(3, 1))
    flags:add(f.data_fence, tvb(3, 1))
    flags:add(f.data_beside, tvb(3, 1))
    if tvb(2, 1):uint() == FEC then flags:add(f.data_repair, tvb(3, 1)) end
    tree:add(f.dst_flow, tvb(4, 4))
    tree:add(f.packet_number, tvb(8, 4))
    tree:add(f.index, tvb(12, 2))
    tree:add(f.count, tvb(14, 2))
    local index, count = tvb(12, 2):uint(), tvb(14, 2):uint()
    local place = string.format(" > %08x, number %u, chunk %u of %u", tvb(4, 4):uint(), tvb(8, 4):uint(), index + 1, count)
    pinfo.cols.info:append(place)
    tree:append_text(place)
    if index >= count then return refuse(tree, pinfo, "the chunk lies outside its train") end
    local at = DATA_HEADER_LEN
    local stack = tvb(2, 1):uint()
    local is_sealed = stack == 3 or stack == 4 or stack == 6 or stack == 7 or stack == 9 or stack == 10
    local is_fence = tvb(3, 1):uint() % 2 == 1
    if stack == SCTP and not is_fence then return dissect_sctp(tvb, pinfo, tree) end
    -- Of `fec` a chunk has its place in its train before it, or a symbol the length of its block.
    if index == 0 and not is_sealed and stack ~= FEC then
        if not dissect_train(tvb, pinfo, tree) then return false end
        at = at + TRAIN_HEADER_LEN
    end
    if len > at then tree:add(f.chunk, tvb(at, len - at)) end
    -- Only a train of one chunk is a packet by itself, and `secure` shows nothing.
    if count == 1 and stack <= 2 then dissect_inner(tvb, pinfo, root, at, len - at) end
    return true
end

function margay.dissector(tvb, pinfo, root)
    pinfo.cols.protocol = "Margay"
    pinfo.cols.info:clear()
    local tree = root:add(margay, tvb())
    if tvb:reported_len() < 2 then return refuse(tree, pinfo, "too short for a header") end
    local kind = tvb(1, 1):uint()
    local name = types[kind] or "unknown type " .. kind
    if tvb(0, 1):uint() ~= VERSION then
        tree:add(f.version, tvb(0, 1))
        return refuse(tree, pinfo, "another version")
    end
    pinfo.cols.info:append(name)
    tree:append_text(", " .. name)
    if not types[kind] then
        tree:add(f.version, tvb(0, 1))
        tree:add(f.type, tvb(1, 1))
        return refuse(tree, pinfo, "unknown type")
    end
    if kind == DATA then
        dissect_data(tvb, pinfo, tree, root)
    else
        dissect_message(tvb, pinfo, tree, root)
    end
end

DissectorTable.get("udp.port"):add(PORT, margay)
