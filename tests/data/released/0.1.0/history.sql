BEGIN TRANSACTION;
CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
INSERT INTO "records" VALUES(1,1.79573014660638713836e+09,'policy.loaded',NULL,NULL,'{"digest":"1a479782b983","files":["/tmp/mpsbgz16wdwa/s/policy.toml"]}');
INSERT INTO "records" VALUES(2,1.7957301467352359295e+09,'action',NULL,NULL,'{"action":"StartControl","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(3,1795730146.98505,'action.done',NULL,NULL,'{"action":"StartControl","begun":2,"ok":true,"text":"control daemon 28143 runs (started by this agent)","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(4,1.79573014698561382292e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(5,1.79573014698937106136e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":4,"ok":true,"text":"","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(6,1.79573014720441675182e+09,'gate.connected',NULL,28131,'{}');
INSERT INTO "records" VALUES(7,1.7957301472078077793e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"confirm what a log says: servers of control daemon 28143","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(8,1.79573014722131943702e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":7,"ok":true,"text":"","reason":"confirm what a log says: servers of control daemon 28143","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(9,1.79573014777305340772e+09,'client.waiting',20001,28161,'{"connection":3597796885}');
INSERT INTO "records" VALUES(10,1.79573014777434706691e+09,'turn.began',20001,NULL,'{}');
INSERT INTO "records" VALUES(11,1795730147.784,'server.starting',20001,28163,'{}');
INSERT INTO "records" VALUES(12,1795730148.064,'server.ready',20001,28163,'{}');
INSERT INTO "records" VALUES(13,1.79573014807512950892e+09,'limits.verified',20001,NULL,'{"reason":"server 28163 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":28163}');
INSERT INTO "records" VALUES(14,1.79573014807506155972e+09,'client.connected',20001,28161,'{"waited":0.30200815200805664,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.29464244842529297}');
INSERT INTO "records" VALUES(15,1.79573014948347139353e+09,'client.waiting',20002,28304,'{"connection":3599507303}');
INSERT INTO "records" VALUES(16,1.79573014963198471062e+09,'client.ended',20001,28161,'{"server":28163,"outcome":"ok","seconds":1.5569231510162354,"waited":0.30200815200805664}');
INSERT INTO "records" VALUES(17,1.79573014963421201707e+09,'client.used',20001,28161,'{"seconds":1.557,"busy":0.0,"energy":157.3,"shared":false,"over":true}');
INSERT INTO "records" VALUES(18,1.79573014963643956187e+09,'turn.ended',20001,NULL,'{"seconds":1.8620924949645996,"forced":false}');
INSERT INTO "records" VALUES(19,1.79573014963753461838e+09,'action',NULL,NULL,'{"action":"ShutdownServer","reason":"the last client of server 28163 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":28163,"force":false}');
INSERT INTO "records" VALUES(20,1.79573014963963818553e+09,'action.done',NULL,NULL,'{"action":"ShutdownServer","begun":19,"ok":true,"text":"","reason":"the last client of server 28163 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":28163,"force":false}');
INSERT INTO "records" VALUES(21,1795730149.739,'server.ended',20001,28163,'{"status":0}');
INSERT INTO "records" VALUES(22,1.79573014973962330823e+09,'turn.began',20002,NULL,'{"gap":0.10318374633789062}');
INSERT INTO "records" VALUES(23,1795730149.778,'server.starting',20002,28311,'{}');
INSERT INTO "records" VALUES(24,1795730150.06,'server.ready',20002,28311,'{}');
INSERT INTO "records" VALUES(25,1.79573015007208490372e+09,'limits.verified',20002,NULL,'{"reason":"server 28311 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":28311}');
INSERT INTO "records" VALUES(26,1795730150.07202,'client.connected',20002,28304,'{"waited":0.5885486602783203,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.30535316467285156}');
INSERT INTO "records" VALUES(27,1.79573015140335488313e+09,'lease.given',20003,NULL,'{"number":1,"by":0,"until":1821650151.403355,"job":"job-7"}');
INSERT INTO "records" VALUES(28,1.79573015142969131469e+09,'drain.ordered',NULL,NULL,'{"by":0,"timeout":25920000.0}');
INSERT INTO "records" VALUES(29,1.79573015142984127997e+09,'drain.begun',NULL,NULL,'{"reason":"no new client is let in; clients at work go on for 300d00h","rule":"drain","enforce":true}');
CREATE TABLE sessions (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, instance TEXT, uid INTEGER, pid INTEGER NOT NULL,
        came REAL NOT NULL, passed REAL, ended REAL, outcome TEXT, why TEXT, job TEXT, more TEXT NOT NULL
    );
INSERT INTO "sessions" VALUES(9,'client',NULL,20001,28161,1.79573014777305340772e+09,1.79573014807506155972e+09,1.79573014963198471062e+09,'ok',NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488,"counted":1.557,"busy":0.0,"energy":157.3,"shared":false}');
INSERT INTO "sessions" VALUES(10,'turn',NULL,20001,0,1.79573014777434706691e+09,1.79573014777434706691e+09,1.79573014963643956187e+09,'left',NULL,NULL,'{"gap":null,"before":null}');
INSERT INTO "sessions" VALUES(15,'client',NULL,20002,28304,1.79573014948347139353e+09,1795730150.07202,NULL,NULL,NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488}');
INSERT INTO "sessions" VALUES(22,'turn',NULL,20002,0,1.79573014973962330823e+09,1.79573014973962330823e+09,NULL,NULL,NULL,NULL,'{"gap":0.10318374633789062,"before":20001}');
CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
CREATE INDEX sessions_kind ON sessions (kind, uid, passed, ended);
CREATE INDEX sessions_open ON sessions (number) WHERE ended IS NULL;
COMMIT;
PRAGMA user_version=4;
